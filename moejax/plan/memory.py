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
from moejax.plan.activations import layer_bytes, local_batch, logit_bytes, saved_bytes
from moejax.plan.exchange import exchange_of, exchange_sizes
from moejax.plan.tensors import Tensor
from moejax.plan.turns import table_of
from moejax.sharding import compute_axes
from moejax.stages import plan_stages


def memory(config: Config, tensors: Sequence[Tensor]) -> dict[str, int]:
    """Bytes on one device while a step runs, by class; together they are its peak.

    Returns:
        The classes of `state_memory`; `saved activations` that forward leaves for backward; `exchange buffers` of one
        layer; and `workspace`: what else one layer, or the loss, needs at its peak.
    """
    saved, layer = _activations(config)
    saved = _stashed(config, saved)
    buffers = min(exchange_bytes(config), layer)
    rest = {
        "saved activations": saved,
        "exchange buffers": buffers,
        "workspace": max(layer + _expert_workspace(config) - buffers, logit_bytes(config) - buffers),
    }
    return state_memory(config, tensors) | rest


def _expert_workspace(config: Config) -> int:
    """What the experts' gradient rule makes for itself: gate, up, their product and its gradient, of every row."""
    if not config.model.num_moe_layers:
        return 0
    moe = config.model.moe
    inner = 2 if moe.activation == "relu2" else 4
    hidden = moe.expert_dim // config.mesh.group(compute_axes(config, "expert_mlp"))
    return exchange_sizes(config).rows * inner * hidden * (4 if config.model.dtype == "float32" else 2)


def _stashed(config: Config, saved: int) -> int:
    """Saved activations of the layers and microbatches that a pipeline stage holds at once.

    A slot of the schedule's table holds those of one chunk of layers; one slot more takes what bubbles write. Hidden
    states that wait for the head's gradient come on top. Without a pipeline: those of all layers and one microbatch.
    """
    table = table_of(config)
    if table is None:
        return saved
    groups, placed = config.model.layers, plan_stages(config).per_chunk
    layers = sum(slots * len(group.pattern) for slots, group in zip(placed, groups, strict=True))
    rows, length = local_batch(config)
    hidden = rows * length * config.model.d_model * (4 if config.model.dtype == "float32" else 2)
    return saved * layers * (table.depth + 1) // config.model.num_layers + (table.head_depth + 1) * hidden


def exchange_bytes(config: Config) -> int:
    """Bytes of the rows that one MoE layer sends, receives and sorts by expert, one way."""
    if not config.model.num_moe_layers:
        return 0
    sizes = exchange_sizes(config)
    width = 4 if config.model.dtype == "float32" else 2
    moved = 0 if exchange_of(config) == "local" else sizes.slots + sizes.arriving
    return (moved + sizes.rows) * width * (config.model.moe.latent_dim or config.model.d_model)


def _activations(config: Config) -> tuple[int, int]:
    """Bytes of saved activations, and of one layer's; both grow with the sequences of a microbatch."""
    rows, _ = local_batch(config)
    if config.mesh.stage > 1:  # the head runs its backward pass at once, and multi-token prediction with it
        config = config.without_mtp
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
    layer = _layer_bytes(_Frozen(dataclasses.replace(alone, remat=RematConfig("none"))))
    return rows * _saved_bytes(_Frozen(alone)), rows * layer


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
def _layer_bytes(frozen: _Frozen) -> int:
    return layer_bytes(frozen.config)


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
        gradients, accumulators = _largest_layer(tensors), sum(4 * tensor.compute_size for tensor in tensors)
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
    layers: dict[str, int] = {}
    for tensor in tensors:
        group = tensor.name.partition(".")[0] if tensor.stacked else ""
        repeat = tensor.layout.shape[0] if tensor.stacked else 1
        layers[group] = layers.get(group, 0) + tensor.compute_bytes // repeat
    return layers.pop("", 0) + max(layers.values(), default=0)


def bytes_per_parameter(replicas: int, expert_ranks: int | None = None, distributed: bool = True) -> float:
    """The report's figure 9: bytes of training state for each parameter, bfloat16 compute and AdamW.

    Args:
        replicas: Devices D that share the optimizer's state.
        expert_ranks: Ranks M_E over which a routed expert's parameter is spread; None for a dense one.
        distributed: Whether main weights and moments are sharded over replicas at all.
    """
    return 6.0 / (expert_ranks or 1) + 12.0 / (replicas if distributed else 1)
