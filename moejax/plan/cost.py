"""Time of a step from a roofline of the target, split into model time and taxes (report, equation 5 and table 2).

Model time is useful FLOPs at peak. Each tax is estimated alone and nothing overlaps, so the step is an upper
bound of what these formulas know; what they do not know (launches, imbalance, kernels below their roofline) comes
on top.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moejax.axes import AXES
from moejax.config import Config
from moejax.plan.activations import local_batch
from moejax.plan.exchange import exchange_sizes
from moejax.plan.flops import attention_flops, forward_flops, tokens_per_step, training_flops
from moejax.plan.moves import (
    COMBINE,
    CONTEXT_CLASS,
    DISPATCH,
    GATHER,
    PIPELINE,
    PLAN,
    REDUCE,
    TENSOR,
    VOCABULARY,
    Move,
)
from moejax.plan.target import Target
from moejax.plan.tensors import Tensor
from moejax.plan.traffic import step_traffic
from moejax.plan.turns import bubble, counts_ahead
from moejax.sharding import compute_axes
from moejax.stages import plan_stages

TAXES = ("weights", "gradients", "routing", "compute efficiency", "recomputation", "pipeline", "context", "tensor")
"""Recomputation is all that a step computes twice. The last three only on meshes with more than one device on their
axis: sending, and in a pipeline waiting."""


@dataclass(frozen=True)
class Cost:
    """Estimated time of a step on a target.

    Attributes:
        model: Seconds of useful FLOPs at peak.
        taxes: Seconds of each of `TAXES`.
        tokens: Tokens of a step.
        flops: Useful FLOPs of a step on one device.
        peak: FLOP per second of one device for the run's precision.
        mfu_peak: Dense bfloat16 FLOP per second of one device: the denominator of MFU.
    """

    model: float
    taxes: dict[str, float]
    tokens: int
    flops: float
    peak: float
    mfu_peak: float

    @property
    def step(self) -> float:
        """Seconds of a step, nothing overlapped."""
        return self.model + sum(self.taxes.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.tokens / self.step

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation that the estimate amounts to."""
        return self.flops / (self.step * self.mfu_peak)


def step_cost(config: Config, tensors: Sequence[Tensor], target: Target) -> Cost:
    """Estimate a step."""
    share = target.share(config.mesh.size)
    peak, bandwidth = target.peak[config.model.dtype] * share, target.bandwidth * share
    tokens = tokens_per_step(config)
    per_device = tokens / config.mesh.size
    flops = sum(training_flops(config, tensors).values()) * per_device
    moves = {move: move_seconds(move, config, target) / share for move in step_traffic(config, tensors, target)}

    def wire(*names: str) -> float:
        return sum(seconds for move, seconds in moves.items() if move.name in names)

    stored = sum(tensor.storage_size for tensor in tensors)
    states = sum(tensor.optimizer_bytes for tensor in tensors)
    update = (2 * 4 * stored + 4 * stored + 2 * states) / bandwidth
    held = sum(tensor.compute_size if config.weights.gather == "step" else tensor.storage_size for tensor in tensors)
    turns = config.train.microbatches
    accumulate = turns * 10 * held / bandwidth if turns > 1 else 0.0  # read and write float32, read the new part
    taxes = {
        "weights": wire(GATHER) + update,
        "gradients": wire(REDUCE) + accumulate,
        "routing": wire(DISPATCH, COMBINE, PLAN) + _row_seconds(config, bandwidth),
        "compute efficiency": _expert_seconds(config, peak, bandwidth),
        "recomputation": _recomputed_flops(config, tensors) * per_device / peak,
    }
    mesh = config.mesh
    if mesh.stage > 1:
        work = flops / peak + taxes["routing"] + taxes["compute efficiency"] + taxes["recomputation"]
        waiting = work * unevenness(config) / (1 - bubble(config)) - work
        taxes["pipeline"] = waiting + wire(PIPELINE) + (0.0 if mesh.model > 1 else wire(VOCABULARY))
    if mesh.context > 1:
        taxes["context"] = wire(CONTEXT_CLASS)
    if mesh.model > 1:
        taxes["tensor"] = wire(TENSOR, VOCABULARY)
    return Cost(flops / peak, taxes, tokens, flops, peak, target.peak["bfloat16"] * share)


def unevenness(config: Config) -> float:
    """Cost of the largest chunk of layers over the mean: every tick takes as long as its slowest stage."""
    costs = plan_stages(config).costs
    return max(costs) * len(costs) / sum(costs)


def move_seconds(move: Move, config: Config, target: Target) -> float:
    """Time of the moves of one kind, one after the other."""
    return target.seconds(move.kind, move.moved, group_of(config, move.axes))


def group_of(config: Config, axes: Sequence[str]) -> list[int]:
    """Devices of the first group along mesh axes."""
    devices = np.arange(config.mesh.size).reshape(config.mesh.shape)
    index = tuple(slice(None) if axis in axes else 0 for axis in AXES)
    return devices[index].reshape(-1).tolist()


def _layers_turns(config: Config) -> float:
    """MoE layers that one device runs in a step."""
    return config.model.num_routers * config.train.microbatches / config.mesh.stage


def _row_seconds(config: Config, bandwidth: float) -> float:
    """Reading and writing the rows that packing, sorting and merging move, forward and backward."""
    if not config.model.num_moe_layers:
        return 0.0
    sizes = exchange_sizes(config)
    width = 4 if config.model.dtype == "float32" else 2
    row = width * (config.model.moe.latent_dim or config.model.d_model)
    one_way = 2 * (sizes.slots + sizes.arriving + sizes.rows) * row
    passes = 6 if counts_ahead(config) else 4
    return passes * one_way * _layers_turns(config) / bandwidth


def _expert_seconds(config: Config, peak: float, bandwidth: float) -> float:
    """What expert matmuls take beyond their FLOPs at peak, because each expert has few rows.

    Forward, also when it counts routes ahead, input gradient and weight gradient of each matmul are bound by compute
    or by reading and writing rows and weights once.
    """
    moe, model = config.model.moe, config.model
    if not model.num_moe_layers:
        return 0.0
    rows, length = local_batch(config)
    routed = rows * length * moe.top_k
    local = moe.num_experts // config.expert_ranks
    width = 4 if model.dtype == "float32" else 2
    inner = 1 if moe.activation == "relu2" else 2
    outer, hidden = moe.latent_dim or model.d_model, moe.expert_dim // config.mesh.group(_of_width(config))
    beyond = 0.0
    for wide, deep in ((inner * hidden, outer), (outer, hidden)):
        flops = 2.0 * routed * wide * deep
        moved = width * (routed * (wide + deep) + local * wide * deep)
        beyond += (4 if counts_ahead(config) else 3) * max(0.0, moved / bandwidth - flops / peak)
    return beyond * _layers_turns(config)


def _of_width(config: Config) -> tuple[str, ...]:
    return compute_axes(config, "expert_mlp")


def _recomputed_flops(config: Config, tensors: Sequence[Tensor]) -> float:
    """FLOPs of a token that backward does again: attention scores of long sequences always are.

    The forward pass that counts routes ahead does everything but the head again too.
    """
    parts = forward_flops(config, tensors)
    scores = attention_flops(config) if config.data.sequence_length > 512 else 0.0
    layers = sum(flops for part, flops in parts.items() if part not in ("head", "attention scores"))
    again = {
        "none": scores,
        "experts": scores + parts.get("routed experts", 0.0) * 2 / 3,
        "attention": 2 * scores + parts.get("attention", 0.0),
        "save_exchange": scores + layers,
        "offload": scores + layers,
        "full": 2 * scores + layers,
    }
    groups = config.model.layers
    weights = [group.repeat * len(group.pattern) for group in groups]
    weights[-1] += config.model.mtp
    policies = [config.remat.of(index) for index in range(len(groups))]
    ahead = layers + parts["attention scores"] if counts_ahead(config) else 0.0
    return ahead + sum(w * again[policy] for w, policy in zip(weights, policies, strict=True)) / sum(weights)
