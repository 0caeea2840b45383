"""What a training step moves between devices, from formulas alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moejax.axes import AXES, STAGE
from moejax.config import Config
from moejax.plan.axes_traffic import of_axes
from moejax.plan.exchange import of_experts
from moejax.plan.loss_traffic import of_loss
from moejax.plan.moves import GATHER, REDUCE, Key, Move
from moejax.plan.target import Target
from moejax.plan.tensors import Tensor
from moejax.plan.turns import counts_ahead, runs_ahead


def step_traffic(config: Config, tensors: Sequence[Tensor], target: Target | None = None) -> list[Move]:
    """Every move of one optimizer step, equal ones added up.

    Args:
        config: The run.
        tensors: Its parameters.
        target: Machine whose compiler makes the program; see `Target.all_reduced` and `of_experts`.
    """
    platform = target.platform if target else None
    moves: dict[tuple, list[int]] = {}
    for tensor in tensors:
        for key, count, size in _of_weight(config, tensor):
            _add(moves, config, key, count, size)
    for key, count, size, filled in (*of_experts(config, platform), *of_axes(config), *of_loss(config)):
        _add(moves, config, key, count, size, filled)
    found = [Move(*key, *values) for key, values in moves.items() if values[0]]
    return [_summed(move, config, target) for move in found] if target else found


def _summed(move: Move, config: Config, target: Target) -> Move:
    """What the compiler makes of a gather or scatter over the whole slice."""
    slices = target.all_reduced.get(move.kind, ())
    return replace(move, kind="all-reduce") if move.group == config.mesh.size in slices else move


def _add(
    moves: dict[tuple, list[int]], config: Config, key: Key, count: int, size: int, filled: int | None = None
) -> None:
    group = config.mesh.group(key[3])
    if group > 1 and count:
        axes = tuple(axis for axis in AXES if axis in key[3] and config.mesh.group([axis]) > 1)
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
    ahead = turns * repeat if mode != "step" and _read_ahead(config, tensor) else 0
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
            yield (GATHER, "all-gather", dtype, axes), times + again + ahead, width * size
    for axes in layout.gathered:
        if axes:
            yield (REDUCE, "reduce-scatter", "f32", axes), times, 4 * size
            size //= config.mesh.group(axes)
    if staged:
        yield (REDUCE, "all-to-all", "f32", (STAGE,)), times, 4 * here
    if layout.slots:
        size = tensor.storage_size
    if config.mesh.stage > 1 or not tensor.name.endswith("selection_bias"):  # its gradient is zero, and XLA sees that
        yield (REDUCE, "all-reduce", "f32", layout.sum_axes), forward, 4 * size


def _read_ahead(config: Config, tensor: Tensor) -> bool:
    """Whether the forward pass that counts routes ahead reads a parameter."""
    group, place, *_ = (*tensor.name.split("."), "")
    if not tensor.stacked:
        return counts_ahead(config) and group == "embed"
    index = len(config.model.layers) if group == "mtp" else int(group.removeprefix("groups_"))
    mixer, ffn = runs_ahead(config, index, int(place) if place.isdigit() else 0)
    return ffn if tensor.part in ("routed experts", "shared experts", "dense FFN") else mixer


def stacked_sums(config: Config, tensors: Sequence[Tensor]) -> frozenset[tuple[int, ...]]:
    """Shapes of gradients on one device, stacked over layers, that a step sums layer by layer without scattering."""
    if config.weights.gather != "layer":
        return frozenset()
    return frozenset(
        tuple(
            size // config.mesh.group((*compute, *extra))
            for size, compute, extra in zip(layout.shape, layout.compute, layout.extra, strict=True)
        )
        for layout in (tensor.layout for tensor in tensors if tensor.stacked)
        if layout.sum_axes
    )
