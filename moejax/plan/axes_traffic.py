"""What sharding over stages, the sequence, and widths moves: pipeline, context, tensor, and sharded vocabulary."""

from collections.abc import Iterator

from moejax.axes import CONTEXT, STAGE
from moejax.config import Config
from moejax.nn.cross_entropy import CHUNK
from moejax.nn.ring_attention import Ring
from moejax.plan.exchange import Found, exchange_sizes
from moejax.plan.loss_traffic import statistics
from moejax.plan.moves import CONTEXT_CLASS, PIPELINE, TENSOR, VOCABULARY
from moejax.plan.turns import Run, counts_ahead, runs, runs_ahead, table_of, ticks
from moejax.sharding import compute_axes


def of_axes(config: Config) -> Iterator[Found]:
    """Moves over the axes `stage`, `context` and `model`, but those of weights and of the exchange."""
    yield from _pipeline(config)
    yield from _vocabulary(config)
    for run in runs(config):
        for key, times, size, _ in (*_context(config, run), *_tensor(config, run)):
            yield key, times, size, round(size * run.taken)
    if config.mesh.context > 1:
        segments, stages = 4 * rows(config) * config.data.sequence_length, config.mesh.stage
        forward, backward = ticks(config)
        taken, modules = config.train.microbatches / forward, config.model.mtp
        key = (CONTEXT_CLASS, "all-gather", "s32", (CONTEXT,))
        before = forward if counts_ahead(config) else 0
        yield key, before + (forward + backward if stages > 1 else forward), segments, None
        if modules:  # tokens, targets and documents at the end of a shard look into the next one
            passes = 1 + runs_ahead(config, len(config.model.layers), 0)[0]
            policy = config.remat.of(len(config.model.layers) - 1)
            passes_of_documents = passes + (modules > 1 and policy != "none")  # in the loop over modules, so again
            yield key, passes_of_documents * modules * forward, segments // stages, round(segments // stages * taken)
            ahead, key = 4 * 3 * rows(config) * modules, (CONTEXT_CLASS, "collective-permute", "s32", (CONTEXT,))
            yield key, passes * forward, ahead, round(ahead * taken)


def rows(config: Config) -> int:
    """Sequences of a microbatch on one device."""
    return config.data.batch_size // (config.mesh.data * config.mesh.expert * config.train.microbatches)


def _tokens(config: Config) -> int:
    return rows(config) * config.data.sequence_length // config.mesh.context


def _type(config: Config) -> tuple[str, int]:
    return ("f32", 4) if config.model.dtype == "float32" else ("bf16", 2)


def _hidden(config: Config) -> int:
    """Bytes of the hidden states of a microbatch."""
    return _tokens(config) * config.model.d_model * _type(config)[1]


def _pipeline(config: Config) -> Iterator[Found]:
    """Hidden states go to the next stage in each forward tick, their gradients back in each backward tick."""
    table = table_of(config)
    if table is None:
        return
    last = list(table.phases())[-1]
    unread = int(last.stop - last.start == 1)  # what the very last tick sends; XLA sees it if the tick is no loop
    key = (PIPELINE, "collective-permute", _type(config)[0], (STAGE,))
    forward, backward = ticks(config)
    yield key, forward * (2 if counts_ahead(config) else 1) + backward - unread, _hidden(config), None


def _vocabulary(config: Config) -> Iterator[Found]:
    """Sums over shards of the vocabulary: hidden states after the embedding, maxima, sums and gradients in the loss.

    With stages, the last one's hidden states and the first one's gradients go to all. These run once a microbatch,
    although the compiled program holds them for every tick.
    """
    axes, (dtype, width), tokens = compute_axes(config, "vocab"), _type(config), _tokens(config)
    (forward, backward), turns, hidden = ticks(config), config.train.microbatches, _hidden(config)

    def move(of: tuple[str, ...], times: int, size: int, dtype: str = dtype) -> Found:
        return (VOCABULARY, "all-reduce", dtype, of), times, size, round(size * turns / forward)

    if config.mesh.stage > 1:
        yield move((STAGE,), forward, hidden)
        yield (VOCABULARY, "all-reduce", dtype, (STAGE,)), backward, hidden, round(hidden * turns / backward)
        if modules := config.model.mtp:  # shares of the sequences: results, gradients of hidden states and embeddings
            for ahead in (modules, 1, modules):
                yield move((STAGE,), forward, ahead * hidden)
            if config.model.specs[-1].ffn == "moe":  # statistics of their routers
                for of, numbers in statistics(config, summed=False):
                    yield move((STAGE,), forward, 4 * modules * numbers, of)
    ahead = (counts_ahead(config), runs_ahead(config, len(config.model.layers), 0)[0])
    waits = config.mesh.stage > 1 and ahead[1]  # modules wait for the loss of the model, so it is there too
    if waits:
        yield move((STAGE,), forward, hidden)
        yield move((STAGE,), forward, 4 * config.model.mtp * config.model.moe.num_experts, "s32")
    if not axes:
        return
    for place, modules in enumerate((1, config.model.mtp)):  # the model, and all modules at once
        if modules == 0:
            continue
        chunk = min(CHUNK, modules * tokens)
        chunks = -(-modules * tokens // chunk)
        losses = 1 + (place == 0 and waits)
        yield move(axes, (1 + ahead[place]) * forward, modules * hidden)
        yield move(axes, chunks * forward, chunk * config.model.d_model * width)
        yield move(axes, losses * chunks * forward, chunk * 4, "f32")
        yield move(axes, losses * chunks * forward, chunk * 2 * 4, "f32")


def _context(config: Config, run: Run) -> Iterator[Found]:
    """What attention over a sharded sequence moves, and the histograms of whole sequences."""
    shards, attention, (dtype, width) = config.mesh.context, config.model.attention, _type(config)
    if shards == 1:
        return
    split = config.mesh.group(compute_axes(config, "heads"))
    heads = attention.num_heads // split
    kv_heads = attention.num_kv_heads // config.mesh.group(compute_axes(config, "kv_heads"))
    vector = _tokens(config) // run.share * attention.head_dim
    again = {"full": run.backward, "attention": run.backward}.get(run.policy, 0)
    if config.context.attention == "ulysses":
        key = (CONTEXT_CLASS, "all-to-all", dtype, (CONTEXT,))
        sent_again = run.backward if run.policy == "full" else 0
        yield key, run.mixer + run.backward + sent_again, vector * (heads + 2 * kv_heads) * width, None
        yield key, run.mixer + run.backward + again, vector * heads * width, None
    else:
        steps = Ring(CONTEXT, shards, run.spec.window).blocks(config.data.sequence_length // shards)
        permute, both = "collective-permute", 2 * vector * kv_heads
        if steps > 1:
            again = again if steps > 2 else 0  # XLA merges a single permute with that of backward
            there = (steps - 1) * (run.mixer + run.backward + again)
            yield (CONTEXT_CLASS, permute, dtype, (CONTEXT,)), there, both * width, None
            yield (CONTEXT_CLASS, permute, "f32", (CONTEXT,)), (steps - 1) * run.backward, both * 4, None
            yield (CONTEXT_CLASS, permute, dtype, (CONTEXT,)), run.backward, both * width, None
    if run.spec.ffn == "moe" and config.loss.balance_scope in ("sequence", "sequence_unbiased"):
        histogram = 4 * rows(config) // run.share * config.model.moe.num_experts
        straight = run.merged and config.mesh.stage == 1
        repeated = run.backward if run.policy == "full" and not straight else 0
        yield (CONTEXT_CLASS, "all-reduce", "s32", (CONTEXT,)), run.forward + repeated, histogram, None


def _tensor(config: Config, run: Run) -> Iterator[Found]:
    """Sums of the shares of heads and widths: results in forward, gradients of inputs in backward."""
    dtype, _ = _type(config)
    attention, model, hidden = config.model.attention, config.model.moe, _hidden(config) // run.share
    recomputed = run.backward if run.policy != "none" else 0
    full = run.policy == "full"  # otherwise XLA makes some sums of straight code once for both passes

    def move(axes: tuple[str, ...], times: int, size: int, dtype: str = dtype) -> Found:
        return (TENSOR, "all-reduce", dtype, axes), times, size, None

    if axes := compute_axes(config, "heads"):
        yield move(axes, run.mixer + run.backward + (recomputed if full or not run.alone else 0), hidden)
        if attention.qk_norm == "head":
            yield move(axes, 2 * run.backward, 4 * attention.head_dim, "f32")
    straight = run.merged and config.mesh.stage == 1
    again = 0 if run.last or (straight and not full) else recomputed
    dense = 1 if run.spec.ffn == "dense" else bool(model.shared_dim) + bool(model.dense_dim)
    if axes := compute_axes(config, "mlp"):
        yield move(axes, dense * (run.ffn + run.backward + again), hidden)
    if (axes := compute_axes(config, "expert_mlp")) and run.spec.ffn == "moe":
        inner = hidden // config.model.d_model * (model.latent_dim or config.model.d_model)
        yield move(axes, run.ffn + run.backward + again, inner)
        yield move(axes, run.backward, 4 * exchange_sizes(config, run.share).rows, "f32")
