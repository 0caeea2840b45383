"""Collectives of a compiled program, counted from its HLO text with the trip counts of its loops.

The text is what `compiled.as_text()` returns. Each instruction counts as often as the loops around it turn.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

KINDS = (
    "ragged-all-to-all",
    "all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16}
_BITS |= {"s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64}
_BITS |= {"f8e4m3fn": 8, "f8e5m2": 8, "f8e4m3": 8, "f8e8m0fnu": 8}

_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-~]+) (?:\(.*)?\{\s*$")
_START = 'custom_call_target="AsyncCollectiveStart"'
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-~]+)| custom-call-start\(.*called_computations=\{%?([\w.\-~]+)\}")
"""The second form is a collective that TPUs leave to their sparse cores."""
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-~]+)")


@dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: Operation, one of `KINDS`.
        dtype: Type of the data, as HLO writes it.
        shapes: Shape of each tensor it moves, as a whole: gathered, or before it is scattered.
        times: How often one execution of the program runs it.
        groups: Devices of each group; empty for one group of all, or where the text does not say.
        scope: The JAX operation it comes from, with its named scopes.
    """

    kind: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    times: int
    groups: tuple[tuple[int, ...], ...]
    scope: str

    @property
    def tensors(self) -> int:
        """Number of tensors in one execution of the program; XLA may put several into one instruction."""
        return self.times * len(self.shapes)

    @property
    def group_size(self) -> int:
        """Devices that take part in one group; 0 where the text does not say."""
        return len(self.groups[0]) if self.groups else 0

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensors (see `shapes`), over one execution of the program."""
        return self.times * sum(math.prod(shape) for shape in self.shapes) * _BITS[self.dtype] // 8

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends, in the ring algorithms; see `wire_fraction`."""
        return self.bytes * wire_fraction(self.kind, self.group_size)

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """Mesh axes that the groups run over, for a mesh with devices in row-major order."""
        names = list(mesh)
        if not self.groups:
            return tuple(name for name in names if mesh[name] > 1)
        places = np.array(np.unravel_index(self.groups[0], tuple(mesh.values())))
        return tuple(name for name, place in zip(names, places, strict=True) if len(set(place.tolist())) > 1)


def wire_fraction(kind: str, group: int) -> float:
    """Bytes that a device sends for each byte of the whole tensor, in a ring of `group` devices."""
    if kind == "collective-permute":
        return 1.0
    share = (group - 1) / group if group else 0.0
    return 2 * share if kind == "all-reduce" else share


def collectives(text: str) -> list[Collective]:
    """Every collective that the program runs, in the order of the text.

    Raises:
        ValueError: The text has no entry computation, or a loop around a collective has an unknown trip count.
    """
    computations, entry = _computations(text)
    return list(_walk(computations, entry, 1))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Instructions of every computation by name, and the name of the entry."""
    found: dict[str, list[str]] = {}
    entry = None
    lines: list[str] | None = None
    for line in text.splitlines():
        if lines is None:
            header = _HEADER.match(line)
            if header and not line.startswith("HloModule"):
                lines = found.setdefault(header[2], [])
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            lines = None
        else:
            lines.append(line)
    if entry is None:
        raise ValueError("no ENTRY computation in the HLO text")
    return found, entry


def _walk(computations: Mapping[str, Sequence[str]], name: str, times: int) -> Iterator[Collective]:
    lines = computations.get(name, ())
    starts = any(_START in line for line in lines)
    for line in lines:
        if match := _COLLECTIVE.search(line):
            if "chain_id=" in line and not starts:
                continue  # TPU: a collective that runs beside several fusions stands in each of them
            yield _collective(line, match, times, scattered="all-reduce-scatter" in name)
        elif " while(" in line:
            yield from _loop(computations, line, times)
        elif " conditional(" in line:
            for several, one in _BRANCHES.findall(line):
                for branch in several.split(",") if several else [one]:
                    yield from _walk(computations, branch.strip().lstrip("%"), times)
        elif not re.search(r" async-(done|update)\(", line):
            for called, started in _CALLED.findall(line):
                yield from _walk(computations, called or started, times)


def _loop(computations: Mapping[str, Sequence[str]], line: str, times: int) -> Iterator[Collective]:
    body, condition = (re.search(rf"{name}=%?([\w.\-~]+)", line) for name in ("body", "condition"))
    assert body is not None, line
    known = re.search(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)', line)
    trips = int(known[1]) if known else _trips(computations.get(condition[1], ())) if condition else None
    inside = list(_walk(computations, body[1], times * (trips or 1)))
    if inside and trips is None:
        raise ValueError(f"a loop with {len(inside)} collectives has no known trip count: {line.strip()[:120]}")
    yield from inside


def _trips(condition: Sequence[str]) -> int | None:
    """Trip count from a condition `index < constant`; JAX counts from zero by one."""
    constants = dict(re.findall(r"%?([\w.\-~]+) = s32\[\]\S* constant\((\d+)\)", "\n".join(condition)))
    for line in condition:
        compare = re.search(r" compare\([^,]*?%?[\w.\-~]+, [^,]*?%?([\w.\-~]+)\), direction=LT", line)
        if compare and compare[1] in constants:
            return int(constants[compare[1]])
    return None


def _collective(line: str, match: re.Match[str], times: int, scattered: bool) -> Collective:
    """The collective of a line.

    Args:
        line: The instruction.
        match: Of `_COLLECTIVE` on it.
        times: Trip count of the loops around it.
        scattered: Whether the instruction is the all-reduce inside a fusion that scatters its result (TPU).
    """
    kind, start = match[2], bool(match[3])
    text = _outputs(match[1]) if start and match[1].startswith("((") else match[1]
    shapes = [(dtype, _dims(dims)) for dtype, dims in _SHAPE.findall(text) if dtype in _BITS]
    paired = kind in ("all-gather", "all-to-all", "collective-permute", "ragged-all-to-all", "reduce-scatter")
    if start and paired and text == match[1]:
        data = [shape for shape in shapes if shape[1]]  # asynchronous: inputs, outputs, and scalars of the transport
        shapes = data[len(data) // 2 :]
    if kind == "ragged-all-to-all":
        shapes = shapes[:1]  # what follows are the transport's semaphores
    groups = _groups(line)
    if kind == "reduce-scatter":
        size = len(groups[0]) if groups else 1
        shapes = [(dtype, (size, *dims)) for dtype, dims in shapes]
    elif kind == "all-to-all" and not start and len(shapes) > 1:
        shapes = [(shapes[0][0], (len(shapes), *shapes[0][1]))]  # split into one operand for each peer
    scope = re.search(r'op_name="([^"]*)"', line)
    return Collective(
        "reduce-scatter" if scattered else kind,
        shapes[0][0],
        tuple(dims for _, dims in shapes),
        times,
        groups,
        scope[1] if scope else "",
    )


def _outputs(text: str) -> str:
    """The rest of `((inputs), outputs, ...)`, the type of an asynchronous start."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 1 and place:
            return text[place + 1 :]
    return text


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    """Groups of devices: listed, as a reshaped and transposed range, or as axes of a mesh."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", line):
        mesh = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        inner = [name for name in mesh if f"'{name}'" in named[2]]
        outer = [name for name in mesh if name not in inner]
        devices = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
        devices = devices.transpose([list(mesh).index(name) for name in outer + inner])
        return tuple(map(tuple, devices.reshape(-1, math.prod(mesh[name] for name in inner)).tolist()))
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", line):
        return tuple(_dims(group) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    ranged = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if not ranged:
        return ()
    devices = np.arange(math.prod(_dims(ranged[2]))).reshape(_dims(ranged[2]))
    if ranged[3]:
        devices = devices.transpose(_dims(ranged[3]))
    return tuple(map(tuple, devices.reshape(_dims(ranged[1])).tolist()))
