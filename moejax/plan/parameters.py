"""Counts of parameters: total, and what one token uses.

Active parameters are P_always + K x P_expert (report, equation 2), so routed experts count with K / N of their
size. "Active" is published under three conventions; all are given.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import jax

from moejax.config import Config
from moejax.model.decoder import Decoder
from moejax.model.parameters import count


@dataclass(frozen=True)
class Counts:
    """Parameters of a model.

    Attributes:
        total: All.
        routed: In routed experts.
        active: Used by one token: everything but the routed experts that it does not choose.
        embedding: In the input embedding.
        head: In the output head; zero where it is the embedding.
        parts: Total by part of the model.
    """

    total: int
    routed: int
    active: int
    embedding: int
    head: int
    parts: dict[str, int]

    @property
    def active_without_embedding(self) -> int:
        """Active, less the input embedding, tied to the head or not: a lookup does no work."""
        return self.active - self.embedding

    @property
    def active_without_embedding_and_head(self) -> int:
        """Active in the layers and the last norm alone."""
        return self.active - self.embedding - self.head

    @property
    def active_share(self) -> float:
        """alpha_P: active / total (report, equation 3)."""
        return self.active / self.total

    @property
    def capacity_gap(self) -> float:
        """Total / active, 1 for a dense model (report, equation 6)."""
        return self.total / self.active

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {
            "active_without_embedding": self.active_without_embedding,
            "active_without_embedding_and_head": self.active_without_embedding_and_head,
            "alpha_P": self.active_share,
            "capacity_gap": self.capacity_gap,
        }


def module_counts(config: Config) -> Counts:
    """Counts of the module that trains, from its abstract parameters, without multi-token prediction."""
    decoder = Decoder(config.without_mtp)
    parts: dict[str, int] = {}
    leaves = jax.tree.leaves(decoder.dims, is_leaf=lambda x: isinstance(x, tuple))
    for (path, shape), dims in zip(jax.tree_util.tree_leaves_with_path(decoder.shapes), leaves, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        part = part_of(name, dims)
        parts[part] = parts.get(part, 0) + math.prod(shape.shape)
    routed, moe = parts.get("routed experts", 0), config.model.moe
    return Counts(
        total=sum(parts.values()),
        routed=routed,
        active=sum(parts.values()) - routed + routed * moe.top_k // moe.num_experts,
        embedding=parts["embedding"],
        head=parts.get("head", 0),
        parts=parts,
    )


def mtp_parameters(config: Config) -> int:
    """Parameters of multi-token prediction, which `module_counts` leaves out."""
    return count(Decoder(config).shapes) - count(Decoder(config.without_mtp).shapes)


def part_of(name: str, dims: tuple[str, ...]) -> str:
    """Part of the model that a parameter belongs to, from its name and logical dims."""
    if "experts" in dims:
        return "routed experts"
    if "router" in dims:
        return "routers"
    if ".attention." in name:
        return "attention"
    if "norm" in dims:
        return "norms"
    if "vocab" in dims:
        return "embedding" if name.startswith("embed") else "head"
    if "joined" in dims:
        return "MTP projections"
    return "shared experts" if ".shared." in name else "dense FFN"
