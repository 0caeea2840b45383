"""What a pipeline asks of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

Tree = Any
Microbatch = dict[str, jax.Array]


@dataclass(frozen=True)
class Parts:
    """A model in the pieces that a pipeline runs.

    Attributes:
        embed: (ends, microbatch) to hidden states [B, S, D], equal on all stages.
        unembed: (gradients of ends, microbatch, gradient of the hidden states) to gradients with the embedding's added.
        layer: Of each group, (weights of one slot, hidden states, microbatch, live, statistics so far, place) to
            (hidden states, this device's share of the loss) and statistics. `live` is false for an empty slot and in
            a bubble; `place` is the slot.
        head: (ends, last hidden states, microbatch, sums of the microbatches before) to this device's share of the
            loss, and sums to add up, both equal on all stages; its gradient is taken in `head_keys` of ends and in the
            hidden states.
        head_keys: Names of what the head reads.
        per_chunk: Slots of each group in one chunk.
        live: Of each group, which slots of each stage hold a layer [S, slots].
    """

    embed: Callable[[Tree, Microbatch], jax.Array]
    unembed: Callable[[Tree, Microbatch, jax.Array], Tree]
    layer: Mapping[str, Callable[..., Any]]
    head: Callable[[Tree, jax.Array, Microbatch, Tree], tuple[jax.Array, Tree]]
    head_keys: tuple[str, ...]
    per_chunk: Mapping[str, int]
    live: Mapping[str, Any]
