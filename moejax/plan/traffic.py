"""What a training step moves between devices, from formulas alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moejax.axes import AXES, STAGE
from moejax.config import Config
from moejax.plan.axes_traffic import of_axes
from moejax.plan.exchange import of_experts
from moejax.plan.moves import GATHER, REDUCE, Key, Move
from moejax.plan.tensors import Tensor


def step_traffic(config: Config, tensors: Sequence[Tensor], platform: str | None = None) -> list[Move]:
    """Every move of one optimizer step but those of the loss and its statistics, equal ones added up.

    Args:
        config: The run.
        tensors: Its parameters.
        platform: `tpu` for what its compiler makes of them: it turns gathers and scatters over several mesh axes
            that together are all devices into all-reduces, which send twice as much (libtpu 0.0.52), and pads rows of
            a ragged exchange; `cpu` for what stands in for a ragged exchange there.
    """
    moves: dict[tuple, list[int]] = {}
    for tensor in tensors:
        for key, count, size in _of_weight(config, tensor):
            _add(moves, config, key, count, size)
    for key, count, size, filled in (*of_experts(config, platform), *of_axes(config)):
        _add(moves, config, key, count, size, filled)
    found = [Move(*key, *values) for key, values in moves.items()]
    return [_on_tpu(move, config) for move in found] if platform == "tpu" else found


def _on_tpu(move: Move, config: Config) -> Move:
    whole = move.group == config.mesh.size and len([axis for axis in move.axes if config.mesh.group([axis]) > 1]) > 1
    ring = move.kind in ("all-gather", "reduce-scatter")
    return replace(move, kind="all-reduce") if whole and ring else move


def _add(
    moves: dict[tuple, list[int]], config: Config, key: Key, count: int, size: int, filled: int | None = None
) -> None:
    group = config.mesh.group(key[3])
    if group > 1 and count:
        axes = tuple(axis for axis in AXES if axis in key[3])
        total = moves.setdefault((*key[:3], axes, group), [0, 0, 0])
        for place, value in enumerate((1, size, size if filled is None else filled)):
            total[place] += count * value


def _of_weight(config: Config, tensor: Tensor) -> Iterator[tuple[Key, int, int]]:
    """Gathers and reductions of one parameter: (what, how often, bytes)."""
    mode, turns = config.weights.gather, config.train.microbatches
    repeat = tensor.layout.shape[0] if tensor.stacked and mode == "layer" else 1
    forward = 1 if mode == "step" else turns * repeat
    again = forward if repeat > 1 else 0  # XLA unrolls a loop of one turn, and keeps the weights for backward
    dtype, width = ("f32", 4) if tensor.dtype.itemsize == 4 else ("bf16", 2)
    layout, size, times = tensor.layout, tensor.storage_size // repeat, forward
    staged = bool(layout.slots) and layout.stage_dim is not None
    if layout.slots:
        size = size // layout.shape[0] * (config.mesh.stage if staged else len(layout.slots[0]))
    if staged:  # pieces of all stages, one slot at a time
        times = forward * len(layout.slots[0])
        yield (GATHER, "all-to-all", dtype, (STAGE,)), times, width * size
    here = size
    for axes in layout.gathered:
        if axes:
            size *= config.mesh.group(axes)
            yield (GATHER, "all-gather", dtype, axes), times + again, width * size
    for axes in layout.gathered:
        if axes:
            yield (REDUCE, "reduce-scatter", "f32", axes), times, 4 * size
            size //= config.mesh.group(axes)
    if staged:
        yield (REDUCE, "all-to-all", "f32", (STAGE,)), times, 4 * here
    if layout.slots:
        size = tensor.storage_size
    axes = tuple(axis for axis in layout.sum_axes if config.mesh.group([axis]) > 1)
    yield (REDUCE, "all-reduce", "f32", axes), forward, 4 * size
