"""Models by name: the files of configs/models/, and what was published of them.

A file holds either a run's configuration, where the trainer can build the model, or one section `description`
with what there is to count.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from moejax.configure import load_config, shipped
from moejax.errors import UserError, nearest
from moejax.plan.description import FFN, MTP, Description, Group, Layer
from moejax.plan.mixers import KINDS, BlockIndexer, Compressor, LatentIndexer, Mixer
from moejax.plan.parameters import Counts, module_counts, mtp_parameters


@dataclass(frozen=True)
class Model:
    """A model and its counts.

    Attributes:
        key: Name of its file, without the ending.
        name: Its name.
        source: What was counted: the `module` that trains, or a `description`.
        counts: Parameters, without multi-token prediction.
        mtp: Parameters of multi-token prediction.
        experts: (routed experts, experts of a token) of its widest MoE layer; (0, 0) for a dense model.
        published: Total and active parameters as published; None where unknown.
    """

    key: str
    name: str
    source: str
    counts: Counts
    mtp: int
    experts: tuple[int, int]
    published: tuple[int, int] | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        num_experts, top_k = self.experts
        alpha_e = top_k / num_experts if num_experts else None
        found = {"name": self.name, "key": self.key, "source": self.source, **self.counts.as_dict()}
        found |= {"mtp": self.mtp, "num_experts": num_experts, "top_k": top_k, "alpha_E": alpha_e}
        if self.published:
            total, active = self.published
            found |= {"published_total": total, "published_active": active}
            found |= {"total_difference": self.counts.total / total - 1}
            found |= {"active_difference": min((a / active - 1 for a in self._conventions()), key=abs)}
        return found

    def _conventions(self) -> tuple[int, int, int]:
        c = self.counts
        return c.active, c.active_without_embedding, c.active_without_embedding_and_head


def folder() -> Path:
    """The folder of presets: of this clone, or of the installed package.

    Raises:
        UserError: It is not there.
    """
    place = shipped(Path("configs", "models"))
    if not place.is_dir():
        raise UserError("configs/models: not found; run this in a clone of the repository, or give a YAML file")
    return place


def names() -> list[str]:
    """Every preset, oldest model first."""
    found = {path.stem for path in folder().glob("*.yaml")}
    known = [key for key in _published() if key in found]
    return known + sorted(found - set(known))


def read_model(name: str) -> Model:
    """The model of a preset's name, or of a YAML file.

    Raises:
        UserError: There is none, or its file is not right.
    """
    path = Path(name)
    if path.suffix != ".yaml":
        if name not in names():
            raise UserError(f"{name}: no such model{nearest(name, names())}; known: {', '.join(names())}")
        path = folder() / f"{name}.yaml"
    path = shipped(path)
    if description := read_description(path):
        ffns = [layer.ffn for group in description.groups for layer in group.pattern if layer.ffn]
        experts = max(((ffn.num_experts, ffn.top_k) for ffn in ffns), default=(0, 0))
        found = ("description", description.counts(), description.mtp_parameters(), experts)
    else:
        config = load_config(path)
        moe = config.model.moe
        experts = (moe.num_experts, moe.top_k) if config.model.num_moe_layers else (0, 0)
        found = ("module", module_counts(config), mtp_parameters(config), experts)
    published = _published().get(path.stem)
    figures = (int(published["total"]), int(published["active"])) if published else None
    return Model(path.stem, published["name"] if published else path.stem, *found, figures)


def read_description(path: Path) -> Description | None:
    """The description in a file, or None where it holds a configuration.

    Raises:
        UserError: The file is missing, or its description is not right.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML ({error})") from None
    if not isinstance(document, dict) or "description" not in document:
        return None
    try:
        return _description(document["description"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a description of a model ({type(error).__name__}: {error})") from None


def _description(values: dict[str, Any]) -> Description:
    values = dict(values)
    mixers: dict[str, Mixer | None] = {name: _mixer(dict(item)) for name, item in values.pop("mixers").items()}
    ffns: dict[str, FFN | None] = {name: FFN(**item) for name, item in values.pop("ffns").items()}
    norms = values.pop("norms", 2)

    def layers(pattern: list[list[str]]) -> tuple[Layer, ...]:
        none = {"none": None}
        return tuple(Layer((mixers | none)[mixer], (ffns | none)[ffn], norms) for mixer, ffn in pattern)

    groups = tuple(Group(item["repeat"], layers(item["pattern"])) for item in values.pop("layers"))
    mtp = values.pop("mtp", None)
    tail = MTP(layers(mtp.pop("pattern")), **mtp) if mtp else None
    return Description(groups=groups, mtp=tail, **values)


def _mixer(values: dict[str, Any]) -> Mixer:
    kind = KINDS[values.pop("kind")]
    if indexer := values.pop("indexer", None):
        values["indexer"] = LatentIndexer(**indexer) if kind is KINDS["latent"] else BlockIndexer(**indexer)
    if compressor := values.pop("compressor", None):
        values["compressor"] = Compressor(**compressor)
    return kind(**values)


def _published() -> dict[str, dict[str, Any]]:
    text = resources.files("moejax.plan").joinpath("published.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)
