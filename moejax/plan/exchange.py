"""What the exchange of MoE layers holds and moves, from its static sizes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moejax.axes import BATCH_AXES
from moejax.config import Config
from moejax.moe.admission import Capacity
from moejax.moe.exchange import row_bytes
from moejax.plan.moves import COMBINE, DISPATCH, PLAN, Key
from moejax.plan.turns import Run, runs


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


def exchange_sizes(config: Config, share: int = 1) -> ExchangeSizes:
    """Sizes of the buffers that the exchange of a configuration has.

    Args:
        config: The run.
        share: Parts that the sequences of a microbatch are cut into.
    """
    moe, model, ranks = config.moe, config.model.moe, config.expert_ranks
    sequences = config.data.batch_size // (config.mesh.group(BATCH_AXES) * config.train.microbatches)
    tokens = sequences // share * config.data.sequence_length // config.mesh.context
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


Found = tuple[Key, int, int, int | None]
"""What moves, how often, bytes of whole tensors each time, and the part of them that is filled (None: all)."""


def of_experts(config: Config, platform: str | None) -> Iterator[Found]:
    """Moves of all MoE layers and microbatches.

    Args:
        config: The run.
        platform: For what compilers make of them. `tpu` pads rows of `ragged` to whole tiles, sums counts instead of
            gathering them but for `padded` with a capacity, and sums rows of up to four numbers instead of scattering
            them; `cpu` gathers rows of `ragged` everywhere.
    """
    if exchange_of(config) == "local":
        return
    layers = [run for run in runs(config) if run.spec.ffn == "moe"]
    for merged in (False, True):
        if alike := [run for run in layers if run.merged is merged]:
            taken = alike[0].taken
            for key, times, size, filled in _of_layers(config, platform, alike):
                yield key, times, size, round((size if filled is None else filled) * taken) if taken < 1 else filled


def _of_layers(config: Config, platform: str | None, layers: Sequence[Run]) -> Iterator[Found]:
    """Moves of MoE layers that run on equal parts of a microbatch's sequences."""
    exchange, moe = exchange_of(config), config.model.moe
    sizes, ranks = exchange_sizes(config, layers[0].share), config.expert_ranks
    dtype, width = ("f32", 4) if config.model.dtype == "float32" else ("bf16", 2)
    out, row = row_bytes(config)
    count, backward = sum(run.ffn for run in layers), sum(run.backward for run in layers)
    again = sum(run.backward for run in layers if run.policy == "full")
    back_again = sum(run.backward for run in layers if run.policy == "full" and not run.last)
    repeats = [run for run in layers if run.policy == "full" and not (run.merged and config.mesh.stage > 1)]
    plans = count + sum(run.backward for run in repeats)
    # In straight code XLA counts routes once for both passes, but for TPUs.
    counted = count + sum(run.backward for run in repeats if platform == "tpu" or not run.merged)
    summed = platform == "tpu" and (exchange != "padded" or config.moe.capacity is None)

    def move(name: str, kind: str, times: int, size: int, of: str = dtype, filled: int | None = None) -> Found:
        return (name, kind, of, config.moe.expert_axes), times, size, filled

    counts = "all-reduce" if summed else "all-gather"
    yield move(PLAN, counts, counted, 4 * ranks * moe.num_experts, "s32")
    if exchange != "padded" and config.moe.capacity is not None and config.moe.drop_order == "weight":
        yield move(PLAN, "all-gather", plans, 4 * ranks * sizes.tokens * moe.top_k, "f32")
    if exchange == "gather":
        everyone = sizes.arriving
        yield move(PLAN, "all-gather", plans, 2 * 4 * everyone * moe.top_k, "s32")
        yield move(DISPATCH, "all-gather", count + again, everyone * row)
        yield move(DISPATCH, "all-gather", count + again, 4 * everyone * moe.top_k, "f32")
        yield move(DISPATCH, "reduce-scatter", backward, everyone * row)
        narrow = "all-reduce" if summed and moe.top_k <= _TPU_NARROW else "reduce-scatter"
        yield move(DISPATCH, narrow, backward, 4 * everyone * moe.top_k, "f32")
        yield move(COMBINE, "reduce-scatter", count + back_again, everyone * row)
        yield move(COMBINE, "all-gather", backward, everyone * row)
        return
    small = 4 * sizes.lanes  # routing weights of a row, and where its routes go
    there = small + (small if exchange == "padded" or config.moe.deduplicate else 0)
    bits = f"u{8 * width}"  # row, weights and places cross as one array
    out_bits = "u8" if config.moe.wire == "mxfp8" else bits
    if exchange == "padded":
        yield move(DISPATCH, "all-to-all", count + again, sizes.arriving * (out + there), out_bits)
        yield move(DISPATCH, "all-to-all", backward, sizes.arriving * (row + small), bits)
        yield move(COMBINE, "all-to-all", count + back_again + backward, sizes.arriving * row)
        return
    if config.moe.deduplicate:
        yield move(PLAN, counts, plans, 4 * ranks * ranks, "s32")
    there_rows, back_rows, rows = _rows_of_ragged(config, sizes, platform)
    kind = "all-gather" if platform == "cpu" else "ragged-all-to-all"
    for name, times, size, of, to in (
        (DISPATCH, count + again, out + there, out_bits, there_rows),
        (DISPATCH, backward, row + small, bits, back_rows),
        (COMBINE, count + back_again, row, dtype, back_rows),
        (COMBINE, backward, row, dtype, there_rows),
    ):
        wide = -(-size // _TPU_TILE) * _TPU_TILE if platform == "tpu" else size
        filled = None if platform == "cpu" else round(rows * wide)
        yield move(name, kind, times, to * wide, of, filled)


_TPU_TILE = 512
"""Bytes that a row of a ragged exchange is padded to on TPUs: two rows of 128 lanes of 16 bits (libtpu 0.0.52)."""

_TPU_NARROW = 4
"""Numbers in a row up to which libtpu 0.0.52 sums whole arrays instead of scattering the sum."""


def _rows_of_ragged(config: Config, sizes: ExchangeSizes, platform: str | None) -> tuple[int, int, float]:
    """Rows of the buffers that a ragged exchange fills on the way there and back, and how many have something in them.

    A token goes to each rank that holds an expert of its choice: once for each choice, or de-duplicated once for
    each of ranks x (1 - C(N - N / ranks, K) / C(N, K)) ranks, if all choices are equally likely.
    """
    moe, ranks = config.model.moe, config.expert_ranks
    filled = float(sizes.tokens * moe.top_k)
    if config.moe.deduplicate:
        elsewhere = math.comb(moe.num_experts - moe.num_experts // ranks, moe.top_k)
        filled = sizes.tokens * ranks * (1 - elsewhere / math.comb(moe.num_experts, moe.top_k))
    filled = min(filled, sizes.slots, sizes.arriving)
    if platform == "cpu":  # gathers the send buffers of all
        return ranks * sizes.slots, ranks * sizes.arriving, filled
    return sizes.arriving, sizes.slots, filled
