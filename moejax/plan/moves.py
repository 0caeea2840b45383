"""Moves of data between devices: what the formulas and the compiled programs are compared in.

A `Move` counts as compiled HLO does: tensors, and bytes of whole tensors (gathered, or before they are scattered).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from moejax.plan.hlo import Collective, wire_fraction

GATHER, REDUCE = "weight gather", "gradient reduce"
PLAN, DISPATCH, COMBINE, LOSS = "plan", "dispatch", "combine", "loss"

CLASSES = (GATHER, REDUCE, DISPATCH, COMBINE, PLAN, LOSS)
"""Classes of traffic. `plan` is the exchange's counts and row numbers; `loss` everything else."""


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


def compiled_traffic(found: Iterable[Collective], mesh: Mapping[str, int]) -> list[Move]:
    """The same, counted from a compiled program; groups of one device move nothing."""
    moves: dict[tuple, list[int]] = {}
    for item in found:
        if item.group_size > 1:
            key = (class_of(item), item.kind, item.dtype, item.axes(mesh), item.group_size)
            total = moves.setdefault(key, [0, 0])
            total[0] += item.tensors
            total[1] += item.bytes
    return [Move(*key, *values) for key, values in moves.items()]


_SCOPES = {"dispatch": DISPATCH, "combine": COMBINE, "plan": PLAN, "reduce": REDUCE, "gather": GATHER}


def class_of(item: Collective) -> str:
    """Class of a collective, from the named scopes that it comes from."""
    for scope, name in _SCOPES.items():
        if re.search(rf"\b{scope}\b", item.scope):
            return name
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
