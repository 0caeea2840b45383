"""Pipeline schedules as tables, made in NumPy: what each stage does in each tick.

A *unit* is one microbatch in one chunk of layers. Units go in groups of as many microbatches as there are stages, the
chunks of a group in turn; unit u enters the last stage's view S - 1 ticks after the first one's. Backward units are
the mirror image: `1f1b` starts them as soon as the first forward unit has left the last chunk, `gpipe` when all have.
A tick is at most one forward and one backward unit on each stage.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

HALVES = ("forward", "backward")


@dataclass(frozen=True)
class Phase:
    """Consecutive ticks that do the same kind of work.

    Attributes:
        start: First tick.
        stop: Tick after the last.
        forward: Whether there are forward units.
        backward: Whether there are backward units.
    """

    start: int
    stop: int
    forward: bool
    backward: bool


@dataclass(frozen=True)
class Table:
    """A schedule.

    Attributes:
        stages: Stages S.
        microbatches: Microbatches M.
        virtual: Chunks on each stage v.
        live: Units whose residuals each stage keeps at most: those between their forward and their backward tick.
        head_depth: Gradients of the last hidden states that wait for their backward tick at most.
        columns: For each stage [T, S]: `forward`/`backward` with `_microbatch`, `_chunk`, `_slot`, and `_valid`; for
            all stages [T]: `embed` and `unembed` (forward and backward of the first stage's first chunk) and `head`
            (of the last stage's last chunk) with `_microbatch` and `_valid`; `head_slot` (written) and `grad_slot`
            (read). What is not valid points to slot `depth`.
    """

    stages: int
    microbatches: int
    virtual: int
    live: tuple[int, ...]
    head_depth: int
    columns: dict[str, np.ndarray]

    @property
    def depth(self) -> int:
        """Slots for residuals: the same on every stage, because all run one program."""
        return max(self.live)

    @property
    def num_ticks(self) -> int:
        """Ticks of a step."""
        return len(self.columns["forward_valid"])

    def phases(self) -> Iterator[Phase]:
        """Yield the ticks in runs that do the same kind of work."""
        kinds = [tuple(self.columns[f"{half}_valid"][t].any() for half in HALVES) for t in range(self.num_ticks)]
        start = 0
        for tick in range(1, self.num_ticks + 1):
            if tick == self.num_ticks or kinds[tick] != kinds[start]:
                yield Phase(start, tick, bool(kinds[start][0]), bool(kinds[start][1]))
                start = tick

    def idle_share(self, forward: float = 1.0, backward: float = 2.0) -> float:
        """Share of the time of all stages in which they wait, if units take `forward` and `backward`.

        For 1f1b and gpipe it is (S - 1) / (v M + S - 1) when S divides M (report section 6).
        """
        busy = [self.columns[f"{half}_valid"] for half in HALVES]
        work = busy[0] * forward + busy[1] * backward
        return 1.0 - float(work.sum() / (work.max(axis=1).sum() * self.stages))


def make_table(stages: int, microbatches: int, virtual: int, schedule: Literal["1f1b", "gpipe"]) -> Table:
    """The schedule for S stages, M microbatches and v chunks on each stage."""
    group = stages * virtual
    last = (-(-microbatches // stages) - 1) * group + (virtual - 1) * stages + (microbatches - 1) % stages
    forward_ticks = last + stages
    start = group - 1 if schedule == "1f1b" else forward_ticks
    tick, stage = np.arange(forward_ticks + start)[:, None], np.arange(stages)[None, :]

    def units(unit: np.ndarray, mirrored: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        safe = np.maximum(unit, 0)
        microbatch, chunk = safe // group * stages + safe % stages, safe % group // stages
        chunk = virtual - 1 - chunk if mirrored else chunk
        valid = (unit >= 0) & (unit <= last) & (microbatch < microbatches)
        return np.where(valid, microbatch, 0), np.where(valid, chunk, 0), valid

    table: dict[str, np.ndarray] = {}
    for half, unit in (("forward", tick - stage), ("backward", tick - (stages - 1 - stage) - start)):
        for name, column in zip(("microbatch", "chunk", "valid"), units(unit, half == "backward"), strict=True):
            table[f"{half}_{name}"] = column
    for name, half, at, chunk in (
        ("embed", "forward", 0, 0),
        ("unembed", "backward", 0, 0),
        ("head", "forward", stages - 1, virtual - 1),
        ("grad", "backward", stages - 1, virtual - 1),
    ):
        table[f"{name}_microbatch"] = table[f"{half}_microbatch"][:, at]
        table[f"{name}_valid"] = table[f"{half}_valid"][:, at] & (table[f"{half}_chunk"][:, at] == chunk)
    live, slots = _color(table, "forward", "backward", ("microbatch", "chunk"))
    table["forward_slot"], table["backward_slot"] = slots
    one = {key: column[:, None] for key, column in table.items() if column.ndim == 1}
    head_live, slots = _color(one, "head", "grad", ("microbatch",))
    table["head_slot"], table["grad_slot"] = slots[0][:, 0], slots[1][:, 0]
    columns = {key: c if c.dtype == bool else c.astype(np.int32) for key, c in table.items()}
    return Table(stages, microbatches, virtual, live, head_live[0], columns)


def _color(
    table: dict[str, np.ndarray], write: str, read: str, names: tuple[str, ...]
) -> tuple[tuple[int, ...], tuple[np.ndarray, np.ndarray]]:
    """Slots in use at most by each stage, and slots [T, S] of what is written in a tick and read in a later one."""
    ticks, stages = table[f"{write}_valid"].shape
    slots = {half: np.full((ticks, stages), -1) for half in (write, read)}
    used: list[int] = []
    for stage in range(stages):
        free: list[int] = []
        live: dict[tuple[int, ...], int] = {}
        count = 0
        for tick in range(ticks):
            if table[f"{write}_valid"][tick, stage]:
                if not free:
                    free, count = [count], count + 1
                slot = free.pop(0)
                live[tuple(int(table[f"{write}_{n}"][tick, stage]) for n in names)] = slot
                slots[write][tick, stage] = slot
            if table[f"{read}_valid"][tick, stage]:
                slot = live.pop(tuple(int(table[f"{read}_{n}"][tick, stage]) for n in names))
                slots[read][tick, stage] = slot
                free.append(slot)
        assert not live, "every unit has a backward tick"
        used.append(count)
    spare = max(used)
    written, found = (np.where(slots[half] < 0, spare, slots[half]) for half in (write, read))
    return tuple(used), (written, found)
