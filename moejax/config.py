"""What a run is: frozen dataclasses, one per top-level key of a YAML file. Standard library only.

Every class checks its own values when it is built and raises `UserError` with the dotted key;
`Config` checks what concerns several sections. An option that would have no effect is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from moejax.axes import AXES, BATCH_AXES, DIMS
from moejax.errors import UserError, nearest


def _require(ok: bool, key: str, value: object, want: str) -> None:
    if not ok:
        raise UserError(f"{key}={value}: must be {want}")


def _positive(section: str, obj: object, *names: str) -> None:
    for name in names:
        value = getattr(obj, name)
        _require(0 < value < inf, f"{section}.{name}", value, "greater than zero")


def _not_negative(section: str, obj: object, *names: str) -> None:
    for name in names:
        value = getattr(obj, name)
        _require(0 <= value < inf, f"{section}.{name}", value, "zero or greater")


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and its seed.

    Args:
        root: Folder that holds runs.
        name: Folder of this run inside `root`.
        seed: Seed of parameters, data order and sampling.
    """

    root: str = "runs"
    name: str = "default"
    seed: int = 0

    def __post_init__(self) -> None:
        _require(
            bool(self.name) and "/" not in self.name and self.name not in (".", ".."),
            "run.name",
            repr(self.name),
            "a folder name without '/'",
        )
        _require(0 <= self.seed < 2**32, "run.seed", self.seed, "between 0 and 2**32 - 1")


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes, outermost first. Their product is the number of devices.

    Args:
        stage: Pipeline stages.
        data: Data-parallel replicas.
        context: Shards of the sequence.
        expert: Shards of the routed experts; also part of data parallelism.
        model: Tensor-parallel shards.
    """

    stage: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    model: int = 1

    def __post_init__(self) -> None:
        _positive("mesh", self, *AXES)
        for axis in ("stage", "context", "model"):
            size = getattr(self, axis)
            _require(size == 1, f"mesh.{axis}", size, "1 in this version; use mesh.data and mesh.expert")

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self) -> int:
        """Number of devices."""
        size = 1
        for n in self.shape:
            size *= n
        return size

    def group(self, axes: Sequence[str]) -> int:
        """Number of devices along `axes` together."""
        size = 1
        for axis in axes:
            size *= getattr(self, axis)
        return size


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention with rotary positions.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides `num_heads`.
        head_dim: Width of one head.
        rope_theta: Base of the rotary frequencies.
        qk_norm: RMSNorm on queries and keys: none, over each head, or over the full projected width.
    """

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10_000.0
    qk_norm: Literal["none", "head", "full"] = "head"

    def __post_init__(self) -> None:
        _positive("model.attention", self, "num_heads", "num_kv_heads", "head_dim", "rope_theta")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "model.attention.num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads={self.num_heads}",
        )
        _require(
            self.head_dim % 2 == 0, "model.attention.head_dim", self.head_dim, "even (rotary embedding pairs dims)"
        )


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
        _positive("model.moe", self, "num_experts", "top_k", "expert_dim", "routed_scale", "shared_gain")
        _positive("model.moe", self, "num_groups", "top_groups")
        _not_negative("model.moe", self, "shared_dim", "dense_dim", "latent_dim")
        _require(
            self.top_k <= self.num_experts, "model.moe.top_k", self.top_k, f"at most num_experts={self.num_experts}"
        )
        shared = bool(self.shared_dim)
        _require(shared or self.shared_gain == 1, "model.moe.shared_gain", self.shared_gain, "1 when shared_dim=0")
        _require(shared or not self.shared_gate, "model.moe.shared_gate", True, "false when shared_dim=0")
        _require(
            bool(self.latent_dim) or not self.latent_norm, "model.moe.latent_norm", True, "false when latent_dim=0"
        )
        after = self.softmax == "after"
        _require(
            not after or self.scores == "softmax", "model.moe.softmax", "after", f"before for scores={self.scores}"
        )
        _require(not after or self.merge != "raw", "model.moe.merge", "raw", "sum_to_one when softmax=after: it is so")
        self._check_groups()

    def _check_groups(self) -> None:
        groups, best = self.num_groups, self.top_groups
        _require(
            self.num_experts % groups == 0,
            "model.moe.num_groups",
            groups,
            f"a divisor of num_experts={self.num_experts}",
        )
        _require(best < groups or groups == 1, "model.moe.top_groups", best, f"less than num_groups={groups}")
        _require(best == 1 or groups > 1, "model.moe.top_groups", best, "1 when num_groups=1")
        room = best * (self.num_experts // groups)
        _require(self.top_k <= room, "model.moe.top_k", self.top_k, f"at most {room}, the experts of top_groups={best}")


@dataclass(frozen=True)
class LayerSpec:
    """One layer: attention, then an FFN.

    Args:
        ffn: Dense SwiGLU, or a mixture of experts.
        window: Sliding window of attention in tokens; null for full causal attention.
    """

    ffn: Literal["dense", "moe"] = "moe"
    window: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.window is None or self.window > 0, "model.layers.window", self.window, "greater than zero, or null"
        )


@dataclass(frozen=True)
class LayerGroup:
    """A pattern of layers, repeated.

    Args:
        repeat: How often the pattern is repeated.
        pattern: The layers of one repetition.
    """

    repeat: int = 1
    pattern: tuple[LayerSpec, ...] = (LayerSpec(),)

    def __post_init__(self) -> None:
        _positive("model.layers", self, "repeat")
        _require(len(self.pattern) > 0, "model.layers.pattern", "[]", "a list of at least one layer")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder language model.

    Args:
        vocab_size: Rows of the embedding; at least the tokenizer's vocabulary.
        d_model: Model width D.
        mlp_dim: Hidden width of dense FFNs; used by layers with `ffn: dense`.
        layers: Groups of layers, first to last; each a repeated pattern.
        attention: Attention of every layer.
        moe: Routed experts of every layer with `ffn: moe`.
        norm_eps: Epsilon of RMSNorm.
        tie_embeddings: Use the embedding as the output head.
        init_std: Standard deviation of the initial weights.
        dtype: Type of compute weights and activations. Main weights are always float32.
    """

    vocab_size: int = 320
    d_model: int = 128
    mlp_dim: int = 512
    layers: tuple[LayerGroup, ...] = (LayerGroup(1, (LayerSpec("dense"),)), LayerGroup(3))
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    moe: MoEModelConfig = field(default_factory=MoEModelConfig)
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        _positive("model", self, "vocab_size", "d_model", "mlp_dim", "norm_eps", "init_std")
        _require(len(self.layers) > 0, "model.layers", "[]", "a list of at least one group")

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """Every layer of the model, first to last."""
        return tuple(spec for group in self.layers for _ in range(group.repeat) for spec in group.pattern)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.specs)

    @property
    def num_moe_layers(self) -> int:
        """Number of layers with routed experts."""
        return sum(spec.ffn == "moe" for spec in self.specs)


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
        routing: `learned`, or for benchmarks `uniform` or `random`, which ignore what the router learned.
    """

    exchange: Literal["local", "padded", "ragged", "gather"] | None = None
    capacity: float | None = None
    capacity_per: Literal["rank", "expert"] = "rank"
    drop_order: Literal["position", "weight"] = "weight"
    renormalize_dropped: bool = False
    deduplicate: bool = False
    routing: Literal["learned", "uniform", "random"] = "learned"

    def __post_init__(self) -> None:
        _require(
            self.capacity is None or self.capacity > 0, "moe.capacity", self.capacity, "greater than zero, or none"
        )
        for name in ("capacity_per", "drop_order", "renormalize_dropped"):
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            idle = self.capacity is None and value != default
            _require(not idle, f"moe.{name}", value, "left out: nothing is dropped without moe.capacity")
        exchange = self.exchange or "the default"
        _require(
            not self.deduplicate or self.exchange in ("padded", "ragged"),
            "moe.deduplicate",
            True,
            f"false with moe.exchange={exchange}: only padded and ragged send a row more than once",
        )


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
    """

    balance_weight: float = 0.01
    balance_scope: Literal["sequence", "sequence_unbiased", "local", "synchronized", "accumulated", "global_batch"] = (
        "sequence"
    )
    z_weight: float = 0.001
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        _not_negative("loss", self, "balance_weight", "z_weight", "bias_rate")
        idle = self.balance_weight == 0 and self.balance_scope != "sequence"
        _require(not idle, "loss.balance_scope", self.balance_scope, "left out: loss.balance_weight is 0")


@dataclass(frozen=True)
class WeightsConfig:
    """When storage is gathered into compute weights.

    Args:
        gather: `step` once per optimizer step; `microbatch` once per microbatch; `layer` in every layer,
            again in backward.
    """

    gather: Literal["step", "microbatch", "layer"] = "step"


@dataclass(frozen=True)
class RematConfig:
    """What backward recomputes.

    Args:
        policy: `none` keeps every activation; `save_exchange` keeps exchanged rows and attention outputs;
            `full` keeps layer inputs only.
    """

    policy: Literal["none", "save_exchange", "full"] = "none"


@dataclass(frozen=True)
class ShardingConfig:
    """Sharding rules: logical dim to mesh axes. Given dims replace the default rule of that dim.

    Args:
        compute: Axes that shard a dim of the compute weights.
        storage: Further axes that shard a dim of the main weights and optimizer state.
        replicate_below: Tensors with fewer elements are not sharded in storage.
    """

    compute: dict[str, tuple[str, ...]] = field(default_factory=dict)
    storage: dict[str, tuple[str, ...]] = field(default_factory=dict)
    replicate_below: int = 4096

    def __post_init__(self) -> None:
        _not_negative("sharding", self, "replicate_below")
        for column in ("compute", "storage"):
            for dim, axes in getattr(self, column).items():
                _require(
                    dim in DIMS,
                    f"sharding.{column}.{dim}",
                    list(axes),
                    f"keyed by a dim, one of {', '.join(DIMS)}{nearest(dim, DIMS)}",
                )
                for axis in axes:
                    _require(
                        axis in AXES,
                        f"sharding.{column}.{dim}",
                        list(axes),
                        f"a list of mesh axes, from {', '.join(AXES)}{nearest(axis, AXES)}",
                    )


@dataclass(frozen=True)
class MixtureSource:
    """One corpus of a mixture.

    Args:
        corpus: As `data.corpus`.
        weight: Share of sequences, relative to the other sources.
    """

    corpus: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        _require(self.weight > 0, "data.mixture.weight", self.weight, "greater than zero")


@dataclass(frozen=True)
class DataConfig:
    """Text, tokenizer and batches.

    Args:
        corpus: `stdlib` (the source of Python's standard library), a folder made by `moejax data prepare`,
            or a folder, glob or file of text.
        mixture: Several corpora with weights, instead of `corpus`.
        tokenizer: `byte`, or the path of a tokenizer.json.
        sequence_length: Tokens per sequence S.
        batch_size: Sequences per optimizer step, over all devices and microbatches.
        heldout_fraction: Share of documents kept for evaluation.
        cache: Folder for token files made from raw text; null for `ROOT/.tokens` under run.root.
    """

    corpus: str = "stdlib"
    mixture: tuple[MixtureSource, ...] = ()
    tokenizer: str = "byte"
    sequence_length: int = 256
    batch_size: int = 32
    heldout_fraction: float = 0.02
    cache: str | None = None

    def __post_init__(self) -> None:
        _positive("data", self, "sequence_length", "batch_size")
        _require(0 < self.heldout_fraction < 1, "data.heldout_fraction", self.heldout_fraction, "between 0 and 1")
        _require(
            not (self.mixture and self.corpus != "stdlib"),
            "data.mixture",
            "given",
            "left out when data.corpus is set: use one of them",
        )

    @property
    def sources(self) -> tuple[MixtureSource, ...]:
        """The mixture; a single corpus is a mixture of one."""
        return self.mixture or (MixtureSource(self.corpus),)


@dataclass(frozen=True)
class TrainConfig:
    """Length of the run.

    Args:
        steps: Optimizer steps.
        microbatches: Parts into which each device's share of a batch is cut; gradients accumulate over them.
    """

    steps: int = 200
    microbatches: int = 1

    def __post_init__(self) -> None:
        _positive("train", self, "steps", "microbatches")


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule.

    Args:
        name: `adamw`, or `muon` (matrices by Muon, the rest by AdamW).
        learning_rate: Peak learning rate.
        schedule: After warm-up: `cosine`, `wsd` (constant, then linear decay) or `constant`.
        warmup_steps: Steps of linear warm-up.
        decay_fraction: Share of the run that `wsd` decays over.
        final_ratio: Learning rate at the end over the peak.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Epsilon of AdamW.
        weight_decay: Decoupled weight decay; never on norms and embeddings.
        clip_norm: Global-norm clipping; null for none.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-3
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 20
    decay_fraction: float = 0.2
    final_ratio: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        _positive("optimizer", self, "learning_rate", "eps")
        _not_negative("optimizer", self, "warmup_steps", "weight_decay")
        _require(0 < self.decay_fraction <= 1, "optimizer.decay_fraction", self.decay_fraction, "between 0 and 1")
        _require(0 <= self.final_ratio <= 1, "optimizer.final_ratio", self.final_ratio, "between 0 and 1")
        for name in ("b1", "b2"):
            _require(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "at least 0 and below 1")
        _require(
            self.clip_norm is None or self.clip_norm > 0,
            "optimizer.clip_norm",
            self.clip_norm,
            "greater than zero, or null",
        )


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out text.

    Args:
        every: Steps between evaluations; the last step is always evaluated.
        batches: Batches of `data.batch_size` sequences per evaluation.
    """

    every: int = 100
    batches: int = 8

    def __post_init__(self) -> None:
        _positive("eval", self, "every", "batches")


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints.

    Args:
        every: Steps between checkpoints; the last step is always saved.
        keep_last: Newest checkpoints kept.
        keep_every: Also keep every checkpoint whose step is a multiple of this; null for none.
        resume: Continue from the newest checkpoint of the run.
    """

    every: int = 100
    keep_last: int = 2
    keep_every: int | None = None
    resume: bool = True

    def __post_init__(self) -> None:
        _positive("checkpoint", self, "every", "keep_last")
        _require(
            self.keep_every is None or (self.keep_every > 0 and self.keep_every % self.every == 0),
            "checkpoint.keep_every",
            self.keep_every,
            f"a multiple of checkpoint.every={self.every}",
        )


@dataclass(frozen=True)
class LogConfig:
    """Metrics.

    Args:
        every: Steps between logged steps.
        tensorboard: Write TensorBoard event files into the run folder.
        wandb: Log to Weights & Biases, if it is installed.
    """

    every: int = 10
    tensorboard: bool = True
    wandb: bool = False

    def __post_init__(self) -> None:
        _positive("log", self, "every")


@dataclass(frozen=True)
class Config:
    """A run.

    Args:
        run: Where the run lives.
        mesh: Mesh axes.
        model: The model.
        moe: How MoE layers run.
        loss: Auxiliary losses.
        weights: When weights are gathered.
        remat: Recomputation.
        sharding: Sharding rules.
        data: Text and batches.
        train: Length of the run.
        optimizer: Optimizer and schedule.
        eval: Evaluation.
        checkpoint: Checkpoints.
        log: Metrics.
    """

    run: RunConfig = field(default_factory=RunConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    remat: RematConfig = field(default_factory=RematConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        shards = self.mesh.group(BATCH_AXES) * self.train.microbatches
        _require(
            self.data.batch_size % shards == 0,
            "data.batch_size",
            self.data.batch_size,
            f"a multiple of {shards}, which is mesh.data x mesh.expert x train.microbatches",
        )
        if self.data.tokenizer == "byte":
            _require(self.model.vocab_size >= 257, "model.vocab_size", self.model.vocab_size, "at least 257 for bytes")
        if self.model.num_moe_layers:
            self._check_moe()
        else:
            for section, given in (("moe", self.moe), ("loss", self.loss)):
                for name, item in type(given).__dataclass_fields__.items():
                    value = getattr(given, name)
                    idle = value != item.default and name not in ("balance_weight", "z_weight")
                    _require(not idle, f"{section}.{name}", value, "left out: no layer of the model has ffn: moe")

    def _check_moe(self) -> None:
        model, shards = self.model.moe, self.mesh.expert
        _require(
            model.num_experts % shards == 0,
            "model.moe.num_experts",
            model.num_experts,
            f"a multiple of mesh.expert={shards}",
        )
        local = self.moe.exchange == "local" and shards > 1
        _require(not local, "moe.exchange", "local", f"padded, or left out, with mesh.expert={shards}")
        once = self.moe.deduplicate and min(model.top_k, model.num_experts // shards) == 1
        _require(not once, "moe.deduplicate", True, "false: a token chooses at most one expert of a rank")
        wide = self.moe.capacity_per == "expert" and model.num_experts == shards
        _require(not wide, "moe.capacity_per", "expert", "left out: each rank has one expert")
        bias = self.loss.bias_rate and not model.selection_bias
        _require(not bias, "loss.bias_rate", self.loss.bias_rate, "0, or set model.moe.selection_bias=true")
        scope = self.loss.balance_scope
        same = scope == "sequence_unbiased" and not (model.selection_bias or model.num_groups > 1)
        _require(not same, "loss.balance_scope", scope, "sequence: there are no bias and no groups")
        once = scope == "accumulated" and self.train.microbatches == 1
        _require(not once, "loss.balance_scope", scope, "synchronized: train.microbatches=1")
