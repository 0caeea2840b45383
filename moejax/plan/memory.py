"""Memory of one device by class, without compiling.

Bytes per parameter (report, figure 9), with bfloat16 compute weights and AdamW over D replicas: 2 + 4 for compute
weights and gradient accumulators in compute layout, 12 / D for main weights and two moments. A replicated optimizer
makes that 18; expert parallelism over M_E ranks divides the 6 of routed experts by M_E. Functional autodiff adds the
gradients of one microbatch, in the type of the compute weights; without accumulation they are all there is.
"""

import dataclasses
from collections.abc import Sequence
from functools import cache

from moejax.config import Config, PipelineConfig, RematConfig, RunConfig, ShardingConfig, WeightsConfig
from moejax.plan.activations import layer_bytes, local_batch, logit_bytes, saved_bytes, stash_bytes
from moejax.plan.exchange import exchange_of, exchange_sizes
from moejax.plan.tensors import Tensor
from moejax.plan.turns import table_of
from moejax.sharding import compute_axes
from moejax.stages import plan_stages


def memory(config: Config, tensors: Sequence[Tensor], platform: str | None = None) -> dict[str, int]:
    """Bytes on one device while a step runs, by class; together they are its peak.

    Args:
        config: The run.
        tensors: Its parameters.
        platform: `cpu`, `gpu` or `tpu`: whose compiler makes the program; None leaves out what one of them alone does.

    Returns:
        The classes of `state_memory`; `saved activations` that forward leaves for backward; `exchange buffers` of one
        layer; `workspace`: what else one layer, or the loss, needs at its peak; and `copies` that a compiler makes.
    """
    saved, layers, kept = _activations(config)
    layer = _layer_workspace(config, layers, kept, platform)
    buffers = min(exchange_bytes(config), layer)
    rest = {
        "saved activations": saved,
        "exchange buffers": buffers,
        "workspace": max(layer, logit_bytes(config)) - buffers,
        "copies": _copies(config, tensors, platform),
    }
    return state_memory(config, tensors) | rest


def _layer_workspace(config: Config, layers: Sequence[int], kept: Sequence[int], platform: str | None) -> int:
    """What backward makes of one layer: what it computes again, and what the experts' gradient rule makes.

    XLA turns a loop of one turn into straight code, and on CPUs schedules what it recomputes there as early as it can:
    what such layers recompute is all there at once, and beside what the layer in a loop does.

    Args:
        config: The run.
        layers: Bytes of all that one repetition of each group makes.
        kept: Bytes that forward keeps of it, which backward reads where they lie.
        platform: Whose compiler makes the program.
    """
    groups = config.model.layers
    placed = plan_stages(config).per_chunk if config.mesh.stage > 1 else tuple(group.repeat for group in groups)
    has_experts = [any(spec.ffn == "moe" for spec in group.pattern) for group in groups]
    experts = _expert_workspace(config)
    sizes = [max(made - k, 0) + experts * some for made, k, some in zip(layers, kept, has_experts, strict=True)]
    if platform != "cpu":
        return max(sizes)
    early = [slots == 1 and config.remat.of(index) != "none" for index, slots in enumerate(placed)]
    looped = max((size for size, alone in zip(sizes, early, strict=True) if not alone), default=0)
    return looped + sum(size for size, alone in zip(sizes, early, strict=True) if alone)


def _copies(config: Config, tensors: Sequence[Tensor], platform: str | None) -> int:
    """Copies that a compiler makes of what is counted already.

    XLA for CPU copies the optimizer's state before it updates it, though its memory is donated, and allocates at the
    start what a pipeline's gradients are scattered into. XLA for TPU holds the experts' and the attention's weights of
    a pipeline twice: as the gather leaves them, for the phases that only go forward or backward, and in the layout in
    which the phase of both reads them.
    """
    if platform == "cpu":
        scattered = sum(4 * tensor.storage_size for tensor in tensors if tensor.layout.slots)
        return sum(tensor.optimizer_bytes for tensor in tensors) + scattered
    if platform == "tpu" and config.mesh.stage > 1:
        parts = ("attention", "routed experts")
        return sum(tensor.compute_bytes for tensor in tensors if tensor.stacked and tensor.part in parts)
    return 0


def _expert_workspace(config: Config) -> int:
    """What the experts' gradient rule makes for itself: gate, up, their product and its gradient, of every row."""
    if not config.model.num_moe_layers:
        return 0
    moe = config.model.moe
    inner = 2 if moe.activation == "relu2" else 4
    hidden = moe.expert_dim // config.mesh.group(compute_axes(config, "expert_mlp"))
    return exchange_sizes(config).rows * inner * hidden * (4 if config.model.dtype == "float32" else 2)


def exchange_bytes(config: Config) -> int:
    """Bytes of the rows that one MoE layer sends, receives and sorts by expert, one way."""
    if not config.model.num_moe_layers:
        return 0
    sizes = exchange_sizes(config)
    width = 4 if config.model.dtype == "float32" else 2
    moved = 0 if exchange_of(config) == "local" else sizes.slots + sizes.arriving
    return (moved + sizes.rows) * width * (config.model.moe.latent_dim or config.model.d_model)


def _activations(config: Config) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Bytes of saved activations; of all that one repetition of each group makes; and what forward keeps of that.

    A slot of a pipeline's stash holds what one chunk of layers keeps of one microbatch. One slot more takes what
    bubbles write, and one is out of the stash: made by forward, or read by backward. Hidden states that wait for the
    head's gradient come on top, with one place more too.
    """
    rows, length = local_batch(config)
    alone = dataclasses.replace(
        config,
        run=RunConfig(),
        mesh=dataclasses.replace(config.mesh, data=1, stage=1),
        pipeline=PipelineConfig(),
        train=dataclasses.replace(config.train, microbatches=1),
        data=dataclasses.replace(config.data, batch_size=config.mesh.expert),
        weights=WeightsConfig(),
        sharding=ShardingConfig(),
    )
    layers = _layer_bytes(_Frozen(dataclasses.replace(alone, remat=RematConfig("none"))))
    layers = tuple(rows * layer for layer in layers)
    whole = dataclasses.replace(alone, data=dataclasses.replace(alone.data, batch_size=rows * config.mesh.expert))
    table = table_of(config)
    if table is None:
        kept = tuple(rows * size for size in _stash_bytes(_Frozen(alone)))
        return rows * _saved_bytes(_Frozen(alone)), layers, kept
    kept = _stash_bytes(_Frozen(whole))
    slot = sum(size * slots for size, slots in zip(kept, plan_stages(config).per_chunk, strict=True))
    hidden = rows * length * config.model.d_model * (4 if config.model.dtype == "float32" else 2)
    return slot * (table.depth + 2) + (table.head_depth + 1) * hidden, layers, kept


class _Frozen:
    """A configuration as a key of a cache."""

    def __init__(self, config: Config) -> None:
        self.config, self.key = config, repr(config)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and other.key == self.key


@cache
def _saved_bytes(frozen: _Frozen) -> int:
    return saved_bytes(frozen.config)


@cache
def _layer_bytes(frozen: _Frozen) -> tuple[int, ...]:
    return layer_bytes(frozen.config)


@cache
def _stash_bytes(frozen: _Frozen) -> tuple[int, ...]:
    return stash_bytes(frozen.config)


def state_memory(config: Config, tensors: Sequence[Tensor]) -> dict[str, int]:
    """Bytes on one device of what follows from the parameters.

    Returns:
        `main weights` and `optimizer state`, which stay between steps, and of the step itself `compute weights`
        `gradients` of one microbatch, and with more than one the float32 `gradient accumulators`. With
        `weights.gather: step` all lie whole in compute layout; with `microbatch` accumulators are storage shards;
        with `layer` gradients are too, and only the largest layer's weights are there at a time. In a pipeline all are
        of this stage's layers, and each layer's gradients are added to its accumulators at once.
    """
    mode, several = config.weights.gather, config.train.microbatches > 1 or config.mesh.stage > 1
    compute = sum(tensor.compute_bytes for tensor in tensors)
    stored = sum(4 * tensor.storage_size for tensor in tensors)
    if config.mesh.stage > 1:
        gradients, accumulators = _gradients_of_stage(tensors), sum(4 * tensor.compute_size for tensor in tensors)
    elif mode == "step":
        gradients, accumulators = compute, sum(4 * tensor.compute_size for tensor in tensors)
    elif mode == "microbatch":
        gradients, accumulators = compute, stored
    else:
        compute = _largest_layer(tensors)
        gradients, accumulators = compute + stored, stored
    return {
        "main weights": sum(tensor.main_bytes for tensor in tensors),
        "optimizer state": sum(tensor.optimizer_bytes for tensor in tensors),
        "compute weights": compute,
        "gradients": gradients,
        "gradient accumulators": accumulators if several else 0,
    }


def _largest_layer(tensors: Sequence[Tensor]) -> int:
    """Bytes of compute weights of the largest repetition of a group, with embedding, head and last norm."""
    layers = _by_group(tensors)
    return layers.pop("", 0) + max(layers.values(), default=0)


def _gradients_of_stage(tensors: Sequence[Tensor]) -> int:
    """Bytes of gradients that wait to be added to a stage's float32 accumulators.

    Of the head, and of what runs with it, in float32, from its loss to the end of the tick. Of the layer that runs
    backward in the compute type, or those of its largest tensor in float32, as the matmul makes it and once more in the
    accumulator's layout.
    """
    ends = [tensor for tensor in tensors if not tensor.stacked]
    head = [tensor for tensor in ends if tensor.part == "head"] or ends
    head += [tensor for tensor in tensors if tensor.layout.shared]
    layer = max((size for group, size in _by_group(tensors).items() if group), default=0)
    largest = max(
        (tensor.compute_size // len(tensor.layout.slots[0]) for tensor in tensors if tensor.layout.slots), default=0
    )
    return sum(4 * tensor.compute_size for tensor in head) + max(layer, 2 * 4 * largest)


def _by_group(tensors: Sequence[Tensor]) -> dict[str, int]:
    """Bytes of compute weights of one repetition of each group, and under an empty name those of no group."""
    layers: dict[str, int] = {}
    for tensor in tensors:
        group = tensor.name.partition(".")[0] if tensor.stacked else ""
        slots = tensor.layout.slots
        repeat = (len(slots[0]) if slots else tensor.layout.shape[0]) if tensor.stacked else 1
        layers[group] = layers.get(group, 0) + tensor.compute_bytes // repeat
    return layers


def bytes_per_parameter(replicas: int, expert_ranks: int | None = None, distributed: bool = True) -> float:
    """The report's figure 9: bytes of training state for each parameter, bfloat16 compute and AdamW.

    Args:
        replicas: Devices D that share the optimizer's state.
        expert_ranks: Ranks M_E over which a routed expert's parameter is spread; None for a dense one.
        distributed: Whether main weights and moments are sharded over replicas at all.
    """
    return 6.0 / (expert_ranks or 1) + 12.0 / (replicas if distributed else 1)
