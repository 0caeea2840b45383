"""Moves of data between devices: what the formulas and the compiled programs are compared in.

A `Move` counts as compiled HLO does: tensors, and bytes of whole tensors (gathered, or before they are scattered).
"""

import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from moejax.axes import CONTEXT, MODEL, STAGE
from moejax.plan.hlo import Collective, wire_fraction

GATHER, REDUCE = "weight gather", "gradient reduce"
PLAN, DISPATCH, COMBINE, LOSS = "plan", "dispatch", "combine", "loss"
PIPELINE, CONTEXT_CLASS, TENSOR, VOCABULARY = "pipeline boundary", "context", "tensor", "vocabulary"

CLASSES = (GATHER, REDUCE, DISPATCH, COMBINE, PLAN, PIPELINE, CONTEXT_CLASS, TENSOR, VOCABULARY, LOSS)
"""Classes of traffic. `plan` is the exchange's counts and row numbers, `tensor` the sums over sharded heads and widths,
`vocabulary` those over a sharded vocabulary; `loss` everything else."""


@dataclass(frozen=True)
class Move:
    """Collectives of one class, operation and type over one step.

    Attributes:
        name: Class, one of `CLASSES`.
        kind: Operation, as HLO names it.
        dtype: Type of the data, as HLO writes it.
        axes: Mesh axes that it runs over.
        group: Devices of one group.
        tensors: How many tensors move.
        bytes: Bytes of the whole tensors.
        filled: The part of `bytes` that is expected to move, where operations move only what is there (the ragged
            exchange); None for all.
    """

    name: str
    kind: str
    dtype: str
    axes: tuple[str, ...]
    group: int
    tensors: int
    bytes: int
    filled: int | None = field(default=None, compare=False)

    @property
    def moved(self) -> int:
        """Bytes that are expected to move."""
        return self.bytes if self.filled is None else self.filled

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends, in the ring algorithms."""
        return self.moved * wire_fraction(self.kind, self.group)


Key = tuple[str, str, str, tuple[str, ...]]
"""Class, operation, type and axes of a move."""


def compiled_traffic(
    found: Iterable[Collective], mesh: Mapping[str, int], stacked: Container[tuple[int, ...]] = ()
) -> list[Move]:
    """The same, counted from a compiled program; groups of one device move nothing.

    What a compiler merged counts as what it was: each tensor of a collective of several, and, of a sum that it took
    out of the loop over layers, each layer.

    Args:
        found: Collectives of the program.
        mesh: Sizes of the mesh axes, outermost first.
        stacked: Shapes of such sums, stacked over layers; see `stacked_sums`.
    """
    moves: dict[tuple, list[int]] = {}
    for item in found:
        if item.group_size > 1:
            axes = item.axes(mesh)
            group = math.prod(mesh[axis] for axis in axes) if item.kind == "collective-permute" else item.group_size
            total = moves.setdefault((class_of(item, axes), item.kind, item.dtype, axes, group), [0, 0])
            sums = (item.kind, item.dtype) == ("all-reduce", "f32")
            merged = [shape[0] for shape in item.shapes if sums and shape in stacked]
            total[0] += item.tensors + item.times * (sum(merged) - len(merged))
            total[1] += item.bytes
    return [Move(*key, *values) for key, values in moves.items()]


_SCOPES = {"dispatch": DISPATCH, "combine": COMBINE, "plan": PLAN, "reduce": REDUCE, "gather": GATHER}
_SCOPES |= {"pipeline": PIPELINE}
_ENDS = re.compile(r"\b(embed|head)\b")


def class_of(item: Collective, axes: tuple[str, ...]) -> str:
    """Class of a collective, from the mesh axes that it runs over and the named scopes that it comes from."""
    weights = re.search(r"\b(gather|reduce)\b", item.scope)
    if axes and set(axes) <= {STAGE, MODEL} and _ENDS.search(item.scope) and not weights:
        return VOCABULARY
    if axes == (MODEL,) and not weights:
        return TENSOR
    for scope, name in _SCOPES.items():
        if re.search(rf"\b{scope}\b", item.scope):
            return name
    if axes == (CONTEXT,):
        return CONTEXT_CLASS
    if not item.scope and item.kind == "ragged-all-to-all":  # CUDA's compiler drops the name; bits are joined rows
        return DISPATCH if item.dtype.startswith("u") else COMBINE
    whole = item.dtype == "f32" and all(item.shapes)
    return REDUCE if not item.scope and whole else LOSS  # XLA merges reductions, and then names none


def by_class(moves: Iterable[Move]) -> dict[str, dict[str, float]]:
    """Tensors, whole bytes and wire bytes of each class."""
    found = {name: {"tensors": 0.0, "bytes": 0.0, "wire_bytes": 0.0} for name in CLASSES}
    for move in moves:
        total = found[move.name]
        total["tensors"] += move.tensors
        total["bytes"] += move.bytes
        total["wire_bytes"] += move.wire_bytes
    return found
