"""What a run is: frozen dataclasses, one per top-level key of a YAML file. Standard library only.

Every class checks its own values when it is built and raises `UserError` with the dotted key;
`Config` checks what concerns several sections. An option that would have no effect is refused.
"""

from dataclasses import dataclass, field, replace

from moejax.axes import BATCH_AXES
from moejax.config.checks import require
from moejax.config.model import AttentionConfig, LayerGroup, LayerSpec, ModelConfig
from moejax.config.moe import LossConfig, MoEConfig, MoEModelConfig
from moejax.config.parallel import (
    ContextConfig,
    MeshConfig,
    PipelineConfig,
    RematConfig,
    ShardingConfig,
    WeightsConfig,
)
from moejax.config.training import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    MixtureSource,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "AttentionConfig",
    "CheckpointConfig",
    "Config",
    "ContextConfig",
    "DataConfig",
    "EvalConfig",
    "LayerGroup",
    "LayerSpec",
    "LogConfig",
    "LossConfig",
    "MeshConfig",
    "MixtureSource",
    "MoEConfig",
    "MoEModelConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "RematConfig",
    "RunConfig",
    "ShardingConfig",
    "TrainConfig",
    "WeightsConfig",
]


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
        pipeline: Pipeline stages.
        context: Sharded sequences.
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
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        shards = self.mesh.group(BATCH_AXES) * self.train.microbatches
        require(
            self.data.batch_size % shards == 0,
            "data.batch_size",
            self.data.batch_size,
            f"a multiple of {shards}, which is mesh.data x mesh.expert x train.microbatches",
        )
        if self.data.tokenizer == "byte":
            require(self.model.vocab_size >= 257, "model.vocab_size", self.model.vocab_size, "at least 257 for bytes")
        narrow = self.weights.compute == "bfloat16" and self.model.dtype != "bfloat16"
        require(not narrow, "weights.compute", "bfloat16", f"left out, or mxfp8, with model.dtype={self.model.dtype}")
        self._check_mesh()
        self._check_remat()
        self._check_mtp()
        if self.model.num_moe_layers:
            self._check_moe()
        else:
            require(not self.log.pairs, "log.pairs", True, "false: no layer of the model has ffn: moe")
            for section, given in (("moe", self.moe), ("loss", self.loss)):
                for name, item in type(given).__dataclass_fields__.items():
                    value = getattr(given, name)
                    idle = value != item.default and name not in ("balance_weight", "z_weight", "mtp_weight")
                    require(not idle, f"{section}.{name}", value, "left out: no layer of the model has ffn: moe")

    @property
    def without_mtp(self) -> "Config":
        """The same run of the model alone, without multi-token prediction."""
        if not self.model.mtp:
            return self
        loss = replace(self.loss, mtp_weight=LossConfig().mtp_weight)
        return replace(self, model=replace(self.model, mtp=0), loss=loss)

    @property
    def expert_ranks(self) -> int:
        """Ranks that experts are sharded over."""
        return self.mesh.group(self.moe.expert_axes)

    def _check_mesh(self) -> None:
        mesh, pipeline, layers = self.mesh, self.pipeline, self.model.num_layers
        for name, item in type(pipeline).__dataclass_fields__.items():
            value = getattr(pipeline, name)
            require(mesh.stage > 1 or value == item.default, f"pipeline.{name}", value, "left out: mesh.stage=1")
        chunks = mesh.stage * pipeline.virtual_stages
        require(chunks <= layers, "mesh.stage", mesh.stage, f"fewer: {layers} layers cannot make {chunks} chunks")
        given = pipeline.layers
        fits = len(given) == chunks and sum(given) == layers
        require(not given or fits, "pipeline.layers", list(given), f"{chunks} numbers whose sum is {layers}")
        late = mesh.stage > 1 and self.weights.gather != "step"
        require(not late, "weights.gather", self.weights.gather, "step with mesh.stage: stages do not meet in between")
        length, heads = self.data.sequence_length, self.model.attention
        require(
            length % mesh.context == 0, "data.sequence_length", length, f"a multiple of mesh.context={mesh.context}"
        )
        require(
            mesh.context > 1 or self.context == ContextConfig(),
            "context.attention",
            "ring",
            "left out: mesh.context=1",
        )
        split = "model" in self.sharding.compute.get("kv_heads", ("model",))
        local = (heads.num_kv_heads if split else heads.num_heads) // mesh.model
        whole = self.context.attention == "ring" or local % mesh.context == 0
        require(
            whole or mesh.context == 1,
            "mesh.context",
            mesh.context,
            f"a divisor of the {local} key-value heads of a device, or set context.attention=ring",
        )

    def _check_remat(self) -> None:
        groups, default = list(self.remat.groups), RematConfig().policy
        count = len(self.model.layers)
        require(len(groups) in (0, count), "remat.groups", groups, f"{count} policies, one for each of model.layers")
        unused = bool(groups) and self.remat.policy != default
        require(not unused, "remat.policy", self.remat.policy, "left out: remat.groups is given")
        used = set(groups) or {self.remat.policy}
        far = "offload" in used and self.mesh.stage > 1
        require(
            not far, "remat.policy", "offload", "another with mesh.stage: what waits in a pipeline stays on devices"
        )

    def _check_mtp(self) -> None:
        modules, weight = self.model.mtp, self.loss.mtp_weight
        idle = not modules and weight != LossConfig().mtp_weight
        require(not idle, "loss.mtp_weight", weight, "left out: model.mtp=0")
        length = self.data.sequence_length // self.mesh.context
        require(modules < length, "model.mtp", modules, f"less than the {length} tokens of a sequence on one device")
        rows = self.data.batch_size // (self.mesh.group(BATCH_AXES) * self.train.microbatches)
        shared = not modules or rows % self.mesh.stage == 0
        require(shared, "model.mtp", modules, f"0, or mesh.stage a divisor of the {rows} sequences of a microbatch")

    def _check_moe(self) -> None:
        model, shards = self.model.moe, self.expert_ranks
        folded = "context" in self.moe.expert_axes
        require(
            not folded or self.mesh.context > 1,
            "moe.expert_axes",
            list(self.moe.expert_axes),
            "[expert]: mesh.context=1",
        )
        require(
            model.num_experts % shards == 0,
            "model.moe.num_experts",
            model.num_experts,
            f"a multiple of {' x '.join(f'mesh.{axis}' for axis in self.moe.expert_axes)}={shards}",
        )
        narrow = self.moe.wire == "bfloat16" and self.model.dtype != "bfloat16"
        require(not narrow, "moe.wire", "bfloat16", f"left out, or mxfp8, with model.dtype={self.model.dtype}")
        width = model.latent_dim or self.model.d_model
        exchange = self.moe.exchange or ("padded" if shards > 1 else "local")
        crosses = self.moe.wire != "mxfp8" or exchange in ("padded", "ragged")
        require(
            crosses, "moe.wire", "mxfp8", f"left out with moe.exchange={exchange}: only padded and ragged send rows"
        )
        whole = self.moe.wire != "mxfp8" or width % 32 == 0
        require(whole, "moe.wire", "mxfp8", f"left out: rows are {width} wide, which is no multiple of 32")
        local = self.moe.exchange == "local" and shards > 1
        require(not local, "moe.exchange", "local", f"padded, or left out: experts are on {shards} ranks")
        once = self.moe.deduplicate and min(model.top_k, model.num_experts // shards) == 1
        require(not once, "moe.deduplicate", True, "false: a token chooses at most one expert of a rank")
        wide = self.moe.capacity_per == "expert" and model.num_experts == shards
        require(not wide, "moe.capacity_per", "expert", "left out: each rank has one expert")
        repeats = self.moe.jitter > 0 and set(self.remat.groups or (self.remat.policy,)) != {"none"}
        require(not repeats, "moe.jitter", self.moe.jitter, "0, or set remat.policy=none: what is repeated may differ")
        bias = self.loss.bias_rate and not model.selection_bias
        require(not bias, "loss.bias_rate", self.loss.bias_rate, "0, or set model.moe.selection_bias=true")
        scope = self.loss.balance_scope
        same = scope == "sequence_unbiased" and not (model.selection_bias or model.num_groups > 1)
        require(not same, "loss.balance_scope", scope, "sequence: there are no bias and no groups")
        once = scope == "accumulated" and self.train.microbatches == 1
        require(not once, "loss.balance_scope", scope, "synchronized: train.microbatches=1")
