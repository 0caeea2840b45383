"""MoE layers: what they are, how they run on a mesh, and their losses."""

from dataclasses import dataclass
from typing import Literal

from moejax.config.checks import not_negative, positive, require


@dataclass(frozen=True)
class MoEModelConfig:
    """Shape and routing of MoE layers: what the model is, whatever mesh it runs on.

    Args:
        num_experts: Routed experts N.
        top_k: Experts chosen per token K.
        expert_dim: Hidden width of one routed expert.
        shared_dim: Hidden width of the shared expert that every token passes; 0 for none. Several shared experts
            are one of their total width.
        shared_gain: Factor on the shared expert's result.
        shared_gate: Multiply the shared expert's result by the sigmoid of a learned projection of the token.
        dense_dim: Hidden width of a dense branch beside the MoE, with a norm of its own; 0 for none.
        latent_dim: Width that experts see; tokens are projected down before dispatch and up after combine; 0 for none.
        latent_norm: RMSNorm on the projected tokens.
        activation: Of routed and shared experts. `clamped_swiglu` is that of gpt-oss, `relu2` has no gate.
        expert_bias: Biases on both matmuls of routed experts.
        scores: Scores from the router's logits.
        softmax: `before` the choice, over all experts, or `after` it, over the logits of the chosen ones.
        merge: Weights of the chosen experts: scores that sum to one, to K, or as they are.
        routed_scale: Factor on the weights of routed experts.
        weight_on: Where the weight multiplies: the expert's output or its input.
        router_bias: Learned bias on the logits.
        router_scale: Learned scale of the router's input, one number a dim.
        selection_bias: Bias that takes part in the choice alone; moved by `loss.bias_rate`, never by the optimizer.
        num_groups: Groups of consecutive experts; 1 for none.
        top_groups: Groups that a token may choose from; a group counts the sum of its two best.
    """

    num_experts: int = 8
    top_k: int = 2
    expert_dim: int = 128
    shared_dim: int = 0
    shared_gain: float = 1.0
    shared_gate: bool = False
    dense_dim: int = 0
    latent_dim: int = 0
    latent_norm: bool = False
    activation: Literal["swiglu", "clamped_swiglu", "geglu", "relu2"] = "swiglu"
    expert_bias: bool = False
    scores: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    softmax: Literal["before", "after"] = "before"
    merge: Literal["sum_to_one", "sum_to_k", "raw"] = "sum_to_one"
    routed_scale: float = 1.0
    weight_on: Literal["output", "input"] = "output"
    router_bias: bool = False
    router_scale: bool = False
    selection_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        positive("model.moe", self, "num_experts", "top_k", "expert_dim", "routed_scale", "shared_gain")
        positive("model.moe", self, "num_groups", "top_groups")
        not_negative("model.moe", self, "shared_dim", "dense_dim", "latent_dim")
        require(
            self.top_k <= self.num_experts, "model.moe.top_k", self.top_k, f"at most num_experts={self.num_experts}"
        )
        shared = bool(self.shared_dim)
        require(shared or self.shared_gain == 1, "model.moe.shared_gain", self.shared_gain, "1 when shared_dim=0")
        require(shared or not self.shared_gate, "model.moe.shared_gate", True, "false when shared_dim=0")
        require(bool(self.latent_dim) or not self.latent_norm, "model.moe.latent_norm", True, "false when latent_dim=0")
        after = self.softmax == "after"
        require(not after or self.scores == "softmax", "model.moe.softmax", "after", f"before for scores={self.scores}")
        require(not after or self.merge != "raw", "model.moe.merge", "raw", "sum_to_one when softmax=after: it is so")
        self._check_groups()

    def _check_groups(self) -> None:
        groups, best = self.num_groups, self.top_groups
        require(
            self.num_experts % groups == 0,
            "model.moe.num_groups",
            groups,
            f"a divisor of num_experts={self.num_experts}",
        )
        require(best < groups or groups == 1, "model.moe.top_groups", best, f"less than num_groups={groups}")
        require(best == 1 or groups > 1, "model.moe.top_groups", best, "1 when num_groups=1")
        room = best * (self.num_experts // groups)
        require(self.top_k <= room, "model.moe.top_k", self.top_k, f"at most {room}, the experts of top_groups={best}")


@dataclass(frozen=True)
class MoEConfig:
    """How MoE layers run on a mesh.

    Args:
        exchange: How rows reach experts: `local` (no expert parallelism), `padded` (static all_to_all), `ragged`
            (ragged_all_to_all; emulated on CPU) or `gather` (all_gather and reduce-scatter). Default: local or padded.
        capacity: Factor on the balanced number of rows that a buffer holds; null (or none) never drops. The budget
            is one for each destination rank, for `padded` one for each source and destination.
        capacity_per: Pool the budget over the experts of a `rank`, or divide it evenly, one for each `expert`.
        drop_order: Who is dropped first: the lowest routing `weight` (for ragged and gather this gathers and sorts
            the weights of all ranks) or the highest `position` (local expert, source rank, position in the batch).
        renormalize_dropped: Scale the weights of a token's other routes up, so that their sum stays as it was.
        deduplicate: A token that chose several experts of one rank crosses the wire once.
        wire: With `mxfp8` dispatched rows cross as E4M3 values with a power-of-two scale per 32 of them, for padded and
            ragged; results and gradients cross as they are. Null (or bfloat16, in a model of that type): as they are.
        expert_axes: Mesh axes that experts are sharded over: [expert], or [context, expert] to fold both.
        routing: `learned`, or for benchmarks `uniform` or `random`, which ignore what the router learned.
        jitter: In training the router's input is multiplied by noise, uniform from 1 - jitter to 1 + jitter; not in
            evaluation. Needs remat.policy=none: recomputation could make other noise, and so other choices.
    """

    exchange: Literal["local", "padded", "ragged", "gather"] | None = None
    capacity: float | None = None
    capacity_per: Literal["rank", "expert"] = "rank"
    drop_order: Literal["position", "weight"] = "weight"
    renormalize_dropped: bool = False
    deduplicate: bool = False
    wire: Literal["bfloat16", "mxfp8"] | None = None
    expert_axes: tuple[str, ...] = ("expert",)
    routing: Literal["learned", "uniform", "random"] = "learned"
    jitter: float = 0.0

    def __post_init__(self) -> None:
        require(self.capacity is None or self.capacity > 0, "moe.capacity", self.capacity, "greater than zero, or none")
        for name in ("capacity_per", "drop_order", "renormalize_dropped"):
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            idle = self.capacity is None and value != default
            require(not idle, f"moe.{name}", value, "left out: nothing is dropped without moe.capacity")
        exchange = self.exchange or "the default"
        require(
            not self.deduplicate or self.exchange in ("padded", "ragged"),
            "moe.deduplicate",
            True,
            f"false with moe.exchange={exchange}: only padded and ragged send a row more than once",
        )
        require(0 <= self.jitter < 1, "moe.jitter", self.jitter, "at least 0 and under 1")
        folds = (("expert",), ("context", "expert"))
        require(self.expert_axes in folds, "moe.expert_axes", list(self.expert_axes), "[expert] or [context, expert]")


@dataclass(frozen=True)
class LossConfig:
    """Weights of the losses that are added to the cross-entropy, and balancing without a loss.

    Args:
        balance_weight: Weight of the load-balancing loss, a mean over MoE layers (1 when balanced).
        balance_scope: Whose choices are counted against a token's scores: its `sequence`'s (the same
            before bias and groups: `sequence_unbiased`, as DeepSeek-V3), those of the device's microbatch
            (`local`), of all devices' microbatch (`synchronized`), of all microbatches so far (`accumulated`), of
            the whole step (`global_batch`; with several microbatches it costs one more forward pass).
        z_weight: Weight of the router z-loss, a mean over tokens and MoE layers.
        bias_rate: Step of the selection bias after each optimizer step, against the load of the whole batch.
        mtp_weight: Weight of the cross-entropy of multi-token prediction, a mean over its modules.
    """

    balance_weight: float = 0.01
    balance_scope: Literal["sequence", "sequence_unbiased", "local", "synchronized", "accumulated", "global_batch"] = (
        "sequence"
    )
    z_weight: float = 0.001
    bias_rate: float = 0.0
    mtp_weight: float = 0.3

    def __post_init__(self) -> None:
        not_negative("loss", self, "balance_weight", "z_weight", "bias_rate")
        positive("loss", self, "mtp_weight")
        idle = self.balance_weight == 0 and self.balance_scope != "sequence"
        require(not idle, "loss.balance_scope", self.balance_scope, "left out: loss.balance_weight is 0")
