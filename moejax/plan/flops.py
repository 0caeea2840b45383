"""Useful FLOPs of training, by the accounting of the report's appendix B.11.

Two FLOPs for each weight of a matmul and token, routed experts with K / N of their weights; attention scores and
their use for the pairs that the causal mask and the window leave, counted exactly over a whole sequence (document
boundaries are not known beforehand). Multi-token prediction counts with all tokens, and uses the head again for each
module. Backward takes twice forward. No recomputation, no padding, no embedding
lookup, no norms.
"""

from collections.abc import Sequence

from moejax.config import Config
from moejax.plan.tensors import Tensor


def forward_flops(config: Config, tensors: Sequence[Tensor]) -> dict[str, float]:
    """FLOPs of one token's forward pass by part of the model, a mean over a sequence."""
    moe, tied = config.model.moe, config.model.tie_embeddings
    parts: dict[str, float] = {}
    for tensor in tensors:
        part = "head" if tensor.part == "embedding" and tied else tensor.part
        matmul = "norm" not in tensor.layout.dims and sum(dim != "layers" for dim in tensor.layout.dims) > 1
        if not matmul or part == "embedding":
            continue
        share = moe.top_k / moe.num_experts if part == "routed experts" else 1.0
        bias = part == "routed experts" and "gate_up" not in tensor.layout.dims and len(tensor.layout.dims) < 4
        share *= 1 + config.model.mtp if part == "head" else 1
        parts[part] = parts.get(part, 0.0) + (0.0 if bias else 2.0 * share * tensor.size)
    parts["attention scores"] = attention_flops(config)
    return parts


def attention_flops(config: Config) -> float:
    """FLOPs of scores and their use, of one token's forward pass in all layers: 4 x heads x width for each pair."""
    attention, length = config.model.attention, config.data.sequence_length
    pairs = sum(causal_pairs(length, spec.window) for spec in config.model.training_specs)
    return 4.0 * attention.num_heads * attention.head_dim * pairs / length


def causal_pairs(length: int, window: int | None) -> int:
    """Pairs (query, key) of a sequence with the key at or before the query, and inside the window."""
    width = min(window or length, length)
    return width * (width + 1) // 2 + (length - width) * width


def training_flops(config: Config, tensors: Sequence[Tensor]) -> dict[str, float]:
    """FLOPs of one token's forward and backward pass by part of the model."""
    return {part: 3.0 * flops for part, flops in forward_flops(config, tensors).items()}


def tokens_per_step(config: Config) -> int:
    """Positions of one optimizer step, on all devices."""
    return config.data.batch_size * config.data.sequence_length


def mfu(flops_per_token: float, tokens_per_second: float, devices: int, peak: float) -> float:
    """Model FLOPs utilisation: useful FLOPs a second over the peak of all devices (report, equation 95).

    Args:
        flops_per_token: Of training.
        tokens_per_second: Of all devices together.
        devices: Their number.
        peak: FLOP a second of one device, dense bfloat16, whatever precision the run uses.
    """
    return flops_per_token * tokens_per_second / (devices * peak)
