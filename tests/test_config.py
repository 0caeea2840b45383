"""Reading configurations: what is accepted, the round trip, and one line for every kind of bad input."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from moejax import Config, UserError, dump_config, load_config
from moejax.config import LayerGroup, LayerSpec, MixtureSource
from moejax.options import argument_texts, options, wanted

CONFIGS = Path(__file__).parent.parent / "configs"

EVERYTHING = [
    "run.name=123",
    "mesh.data=2",
    "mesh.expert=4",
    "model.layers=[{repeat: 2, pattern: [{ffn: dense, window: 16}, {}]}, {}]",
    "model.attention.qk_norm=none",
    "moe.capacity=1.25",
    "moe.exchange=padded",
    "sharding.storage.embed=[data]",
    "sharding.compute={}",
    "data.corpus=stdlib",
    "data.mixture=[{corpus: a*.txt, weight: 2}, {corpus: 'null'}]",
    "data.cache=none",
    "optimizer.learning_rate=1e-3",
    "optimizer.clip_norm=null",
    "log.wandb=true",
]


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def error(*overrides: str, path: Path | None = None) -> str:
    """Return the message of the UserError, which must be one line."""
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def test_nothing_given_is_the_default() -> None:
    assert load_config() == Config()


def test_every_kind_of_value() -> None:
    config = load_config(None, EVERYTHING)
    assert config.run.name == "123"
    assert config.mesh.shape == (1, 2, 1, 4, 1)
    assert config.model.layers == (
        LayerGroup(2, (LayerSpec("dense", 16), LayerSpec("moe"))),
        LayerGroup(1, (LayerSpec("moe"),)),
    )
    assert config.model.num_layers == 5
    assert config.model.num_moe_layers == 3
    assert config.model.attention.qk_norm == "none"
    assert config.moe.capacity == 1.25
    assert config.sharding.storage == {"embed": ("data",)}
    assert config.data.sources == (MixtureSource("a*.txt", 2.0), MixtureSource("null"))
    assert config.data.cache is None
    assert config.optimizer.learning_rate == 1e-3
    assert config.optimizer.clip_norm is None
    assert config.log.wandb is True


@pytest.mark.parametrize("overrides", [[], EVERYTHING], ids=["defaults", "everything"])
def test_dump_reads_back_equal(tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(None, overrides)
    path = write(tmp_path, dump_config(config))
    assert load_config(path) == config
    assert load_config(tmp_path) == config  # the folder of a run


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_are_valid(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    assert load_config(write(tmp_path, dump_config(config))) == config


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {steps: 3}\nmesh:\n  data: 2\n")
    config = load_config(path, ["train.steps=4", "train.steps=5", "mesh.expert=2"])
    assert (config.train.steps, config.mesh.data, config.mesh.expert) == (5, 2, 2)


@pytest.mark.parametrize("value", ["none", "None", "null"])
def test_capacity_none(tmp_path: Path, value: str) -> None:
    assert load_config(None, ["moe.capacity=1.5", f"moe.capacity={value}"]).moe.capacity is None
    assert load_config(write(tmp_path, f"moe:\n  capacity: {value}\n")).moe.capacity is None


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    path = write(tmp_path, "optimizer: {learning_rate: 2e-3, eps: 1E-9, weight_decay: 1}\n")
    optimizer = load_config(path).optimizer
    assert (optimizer.learning_rate, optimizer.eps, optimizer.weight_decay) == (2e-3, 1e-9, 1.0)


def test_every_option_has_a_text_and_words_for_its_type() -> None:
    for option in options():
        assert option.help.endswith("."), option.key
        assert "typing" not in wanted(option.hint), option.key
        assert "<class" not in wanted(option.hint), option.key


def test_no_docstring_names_an_option_that_is_not_there() -> None:
    sections = [Config, LayerGroup, LayerSpec, MixtureSource]
    for section in sections:
        assert list(argument_texts(section)) == [item.name for item in fields(section)]
        sections += [hint for hint in get_type_hints(section).values() if is_dataclass(hint)]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # unknown keys
        ("mesh.exprt=4", "mesh.exprt: no such option; did you mean 'mesh.expert'?"),
        ("meshh.expert=4", "meshh: no such option; did you mean 'mesh'?"),
        ("steps=4", "steps: no such option; did you mean 'train.steps'?"),
        ("dtype=float32", "dtype: no such option; did you mean 'model.dtype'?"),
        (
            "model.layers=[{}, {repet: 2}]",
            "model.layers[1].repet: no such option; did you mean 'model.layers[1].repeat'?",
        ),
        ("sharding.storage.embd=[data]", "did you mean 'embed'?"),
        ("sharding.storage.embed=[dta]", "did you mean 'data'?"),
        ("model.layers.0.repeat=3", "set model.layers as a whole"),
        # wrong types
        ("mesh.expert=four", "mesh.expert=four: must be an integer"),
        ("mesh.expert=4.0", "mesh.expert=4.0: must be an integer"),
        ("mesh.expert=true", "mesh.expert=true: must be an integer"),
        ("mesh.expert=", "mesh.expert=null: must be an integer"),
        ("mesh.expert=[1", "mesh.expert=[1: must be an integer"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate=fast: must be a number"),
        ("log.wandb=maybe", "log.wandb=maybe: must be true or false"),
        ("model.dtype=fp32", "model.dtype=fp32: must be one of bfloat16, float32"),
        ("moe.exchange=raged", "moe.exchange=raged: must be one of local, padded, ragged, gather, or null"),
        ("moe.capacity=lots", "moe.capacity=lots: must be a number, or null"),
        ("mesh=4", "mesh=4: must be a mapping with keys from stage, data"),
        ("model.layers=3", "model.layers=3: must be a list"),
        ("model.layers=[{pattern: [{ffn: mo}]}]", "model.layers.pattern.ffn=mo: must be one of dense, moe"),
        ("model.layers=[{pattern: [{window: 1.5}]}]", "model.layers.pattern.window=1.5: must be an integer, or null"),
        ("data.mixture=[{weight: 2}]", "data.mixture[0].corpus: must be given"),
        # out of range
        ("model.d_model=0", "model.d_model=0: must be greater than zero"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate=nan: must be greater than zero"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate=inf: must be greater than zero"),
        ("optimizer.b1=1", "optimizer.b1=1.0: must be at least 0 and below 1"),
        ("model.layers=[{pattern: [{window: -1}]}]", "model.layers.window=-1: must be greater than zero"),
        ("run.name=a/b", "run.name='a/b': must be a folder name"),
        ("mesh.stage=8", "mesh.stage=8: must be fewer: 4 layers"),
        ("mesh.context=4", "mesh.context=4: must be a divisor of the 2 key-value heads of a device"),
        ("context.attention=ring", "context.attention=ring: must be left out: mesh.context=1"),
        # between sections
        ("mesh.expert=3", "data.batch_size=32: must be a multiple of 3"),
        ("train.microbatches=5", "data.batch_size=32: must be a multiple of 5"),
        ("mesh.expert=16", "model.moe.num_experts=8: must be a multiple of mesh.expert=16"),
        ("model.vocab_size=256", "model.vocab_size=256: must be at least 257"),
        # no override
        ("mesh.expert", "override 'mesh.expert': must look like section.key=value"),
    ],
)
def test_bad_override(override: str, message: str) -> None:
    assert message in error(override)


def test_options_without_effect_are_refused() -> None:
    dense = "model.layers=[{pattern: [{ffn: dense}]}]"
    assert "moe.capacity=1.5: must be left out" in error(dense, "moe.capacity=1.5")
    assert "moe.exchange=padded: must be left out" in error(dense, "moe.exchange=padded")
    assert "moe.exchange=local: must be padded" in error("mesh.expert=2", "moe.exchange=local")
    assert "data.mixture=given" in error("data.corpus=x", "data.mixture=[{corpus: y}]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mesh:\n  exprt: 4\n", "did you mean 'mesh.expert'?"),
        ("msh:\n  expert: 4\n", "did you mean 'mesh'?"),
        ("mesh:\n", "mesh=null: must be a mapping"),
        ("run:\n  name: 123\n", "run.name=123: must be text"),
        ("mesh: {data: 2, data: 4}\n", "line 1: key 'data' stands twice"),
        ("mesh: [\n", "line 2: "),
        ("just words\n", "must hold sections"),
        ("- a\n", "must hold sections"),
        ("? [a]\n: b\n", "config.yaml"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, message: str) -> None:
    assert message in error(path=write(tmp_path, text))


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, "")
    assert "no such configuration file; did you mean 'config.yaml'?" in error(path=tmp_path / "confg.yaml")
    assert "no such configuration file" in error(path=tmp_path / "no" / "where")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    assert "not a text file" in error(path=tmp_path / "binary.yaml")
    (tmp_path / "folder").mkdir()
    assert "has no config.yaml" in error(path=tmp_path / "folder")


def test_empty_file_is_the_default(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# nothing\n")) == Config()
