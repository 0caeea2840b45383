"""What a training step moves between devices, from formulas alone.

A `Move` counts as compiled HLO does: tensors, and bytes of whole tensors (gathered, or before they are scattered).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moejax.axes import BATCH_AXES
from moejax.config import Config
from moejax.moe.admission import Capacity
from moejax.plan.hlo import Collective, wire_fraction
from moejax.plan.tensors import Tensor

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
    """

    name: str
    kind: str
    dtype: str
    axes: tuple[str, ...]
    group: int
    tensors: int
    bytes: int

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends, in the ring algorithms."""
        return self.bytes * wire_fraction(self.kind, self.group)


def step_traffic(config: Config, tensors: Sequence[Tensor], platform: str | None = None) -> list[Move]:
    """Every move of one optimizer step but those of the loss and its statistics, equal ones added up.

    Args:
        config: The run.
        tensors: Its parameters.
        platform: `tpu` for what its compiler makes of them: it turns gathers and scatters over several mesh axes
            that together are all devices into all-reduces, which send twice as much (libtpu 0.0.52).
    """
    moves: dict[tuple, list[int]] = {}
    for tensor in tensors:
        for key, count, size in _of_weight(config, tensor):
            _add(moves, config, key, count, size)
    for key, count, size in _of_experts(config):
        _add(moves, config, key, count, size)
    found = [Move(*key, *values) for key, values in moves.items()]
    return [_on_tpu(move, config) for move in found] if platform == "tpu" else found


def _on_tpu(move: Move, config: Config) -> Move:
    whole = move.group == config.mesh.size and len([axis for axis in move.axes if config.mesh.group([axis]) > 1]) > 1
    ring = move.kind in ("all-gather", "reduce-scatter")
    return replace(move, kind="all-reduce") if whole and ring else move


Key = tuple[str, str, str, tuple[str, ...]]


def _add(moves: dict[tuple, list[int]], config: Config, key: Key, count: int, size: int) -> None:
    group = config.mesh.group(key[3])
    if group > 1 and count:
        total = moves.setdefault((*key, group), [0, 0])
        total[0] += count
        total[1] += count * size


def _of_weight(config: Config, tensor: Tensor) -> Iterator[tuple[Key, int, int]]:
    """Gathers and reductions of one parameter: (what, how often, bytes)."""
    mode, turns = config.weights.gather, config.train.microbatches
    repeat = tensor.layout.shape[0] if tensor.stacked and mode == "layer" else 1
    forward = 1 if mode == "step" else turns * repeat
    again = forward if repeat > 1 else 0  # XLA unrolls a loop of one turn, and keeps the weights for backward
    dtype, width = ("f32", 4) if tensor.dtype.itemsize == 4 else ("bf16", 2)
    size = tensor.storage_size // repeat
    for axes in tensor.layout.extra:
        if axes:
            size *= config.mesh.group(axes)
            yield (GATHER, "all-gather", dtype, axes), forward + again, width * size
    for axes in tensor.layout.extra:
        if axes:
            yield (REDUCE, "reduce-scatter", "f32", axes), forward, 4 * size
            size //= config.mesh.group(axes)
    axes = tuple(axis for axis in tensor.layout.sum_axes if config.mesh.group([axis]) > 1)
    yield (REDUCE, "all-reduce", "f32", axes), forward, 4 * size


@dataclass(frozen=True)
class ExchangeSizes:
    """Static sizes of an exchange on one device, for one layer and microbatch.

    Attributes:
        tokens: Tokens of the device.
        rows: Rows of the buffer of expert inputs.
        slots: Rows of the send buffer.
        arriving: Rows of the receive buffer.
        lanes: Routes that one row on the wire serves.
    """

    tokens: int
    rows: int
    slots: int
    arriving: int
    lanes: int


def exchange_of(config: Config) -> str:
    """Name of the exchange, defaults resolved."""
    return config.moe.exchange or ("padded" if config.expert_ranks > 1 else "local")


def exchange_sizes(config: Config) -> ExchangeSizes:
    """Sizes of the buffers that the exchange of a configuration has."""
    moe, model, ranks = config.moe, config.model.moe, config.expert_ranks
    sequences = config.data.batch_size // (config.mesh.group(BATCH_AXES) * config.train.microbatches)
    tokens = sequences * config.data.sequence_length // config.mesh.context
    local, top_k = model.num_experts // ranks, model.top_k
    capacity = Capacity(moe.capacity, moe.capacity_per == "expert")
    most = tokens * min(top_k, local)
    exchange = exchange_of(config)
    if exchange == "padded":
        budget = capacity.rows(-(-tokens * top_k // ranks), most, local)
        slots = min(budget, tokens) if moe.deduplicate else budget
        lanes = min(top_k, local) if moe.deduplicate else 1
        return ExchangeSizes(tokens, ranks * budget, ranks * slots, ranks * slots, lanes)
    if exchange == "local":
        rows = capacity.rows(tokens * top_k, tokens * top_k, local)
        return ExchangeSizes(tokens, rows, 0, 0, 1)
    budget = capacity.rows(tokens * top_k, ranks * most, local)
    if exchange == "gather":
        return ExchangeSizes(tokens, budget, tokens, ranks * tokens, top_k)
    if moe.deduplicate:
        slots, lanes = tokens * min(top_k, ranks), min(top_k, local)
        return ExchangeSizes(tokens, budget, slots, min(budget, ranks * tokens), lanes)
    return ExchangeSizes(tokens, budget, tokens * top_k, budget, 1)


def _of_experts(config: Config) -> Iterator[tuple[Key, int, int]]:
    """Moves of all MoE layers and microbatches: (what, how often, bytes)."""
    exchange, moe = exchange_of(config), config.model.moe
    if exchange == "local" or not config.model.num_moe_layers:
        return
    sizes, ranks = exchange_sizes(config), config.expert_ranks
    dtype, width = ("f32", 4) if config.model.dtype == "float32" else ("bf16", 2)
    row = width * (moe.latent_dim or config.model.d_model)
    count = config.model.num_moe_layers * config.train.microbatches
    again = count if config.remat.policy == "full" else 0  # what recomputation repeats; backward needs no results

    def move(name: str, kind: str, times: int, size: int, of: str = dtype) -> tuple[Key, int, int]:
        return (name, kind, of, config.moe.expert_axes), times, size

    yield move(PLAN, "all-gather", count + again, 4 * ranks * moe.num_experts, "s32")
    if exchange != "padded" and config.moe.capacity is not None and config.moe.drop_order == "weight":
        weights = 4 * ranks * sizes.tokens * moe.top_k
        yield move(PLAN, "all-gather", count + again, weights, "f32")
    if exchange == "gather":
        everyone = sizes.arriving
        yield move(PLAN, "all-gather", count + again, 2 * 4 * everyone * moe.top_k, "s32")
        yield move(DISPATCH, "all-gather", count + again, everyone * row)
        yield move(DISPATCH, "all-gather", count + again, 4 * everyone * moe.top_k, "f32")
        yield move(DISPATCH, "reduce-scatter", count, everyone * row)
        yield move(DISPATCH, "reduce-scatter", count, 4 * everyone * moe.top_k, "f32")
        yield move(COMBINE, "reduce-scatter", count, everyone * row)
        yield move(COMBINE, "all-gather", count, everyone * row)
        return
    kind = "all-to-all" if exchange == "padded" else "ragged-all-to-all"
    small = 4 * sizes.lanes  # routing weights of a row, and where its routes go
    there = small + (small if exchange == "padded" or config.moe.deduplicate else 0)
    bits = f"u{8 * width}"  # row, weights and places cross as one array
    if exchange == "ragged" and config.moe.deduplicate:
        yield move(PLAN, "all-gather", count + again, 4 * ranks * ranks, "s32")
    yield move(DISPATCH, kind, count + again, sizes.arriving * (row + there), bits)
    yield move(DISPATCH, kind, count, sizes.arriving * (row + small), bits)
    yield move(COMBINE, kind, 2 * count, sizes.arriving * row)


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
