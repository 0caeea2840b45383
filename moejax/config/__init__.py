"""What a run is: frozen dataclasses, one per top-level key of a YAML file. Standard library only.

Every class checks its own values when it is built and raises `UserError` with the dotted key;
`Config` checks what concerns several sections. An option that would have no effect is refused.
"""

from dataclasses import dataclass, field

from moejax.axes import BATCH_AXES
from moejax.config.checks import require
from moejax.config.model import AttentionConfig, LayerGroup, LayerSpec, ModelConfig
from moejax.config.moe import LossConfig, MoEConfig, MoEModelConfig
from moejax.config.parallel import MeshConfig, RematConfig, ShardingConfig, WeightsConfig
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
        require(
            self.data.batch_size % shards == 0,
            "data.batch_size",
            self.data.batch_size,
            f"a multiple of {shards}, which is mesh.data x mesh.expert x train.microbatches",
        )
        if self.data.tokenizer == "byte":
            require(self.model.vocab_size >= 257, "model.vocab_size", self.model.vocab_size, "at least 257 for bytes")
        if self.model.num_moe_layers:
            self._check_moe()
        else:
            for section, given in (("moe", self.moe), ("loss", self.loss)):
                for name, item in type(given).__dataclass_fields__.items():
                    value = getattr(given, name)
                    idle = value != item.default and name not in ("balance_weight", "z_weight")
                    require(not idle, f"{section}.{name}", value, "left out: no layer of the model has ffn: moe")

    def _check_moe(self) -> None:
        model, shards = self.model.moe, self.mesh.expert
        require(
            model.num_experts % shards == 0,
            "model.moe.num_experts",
            model.num_experts,
            f"a multiple of mesh.expert={shards}",
        )
        local = self.moe.exchange == "local" and shards > 1
        require(not local, "moe.exchange", "local", f"padded, or left out, with mesh.expert={shards}")
        once = self.moe.deduplicate and min(model.top_k, model.num_experts // shards) == 1
        require(not once, "moe.deduplicate", True, "false: a token chooses at most one expert of a rank")
        wide = self.moe.capacity_per == "expert" and model.num_experts == shards
        require(not wide, "moe.capacity_per", "expert", "left out: each rank has one expert")
        bias = self.loss.bias_rate and not model.selection_bias
        require(not bias, "loss.bias_rate", self.loss.bias_rate, "0, or set model.moe.selection_bias=true")
        scope = self.loss.balance_scope
        same = scope == "sequence_unbiased" and not (model.selection_bias or model.num_groups > 1)
        require(not same, "loss.balance_scope", scope, "sequence: there are no bias and no groups")
        once = scope == "accumulated" and self.train.microbatches == 1
        require(not once, "loss.balance_scope", scope, "synchronized: train.microbatches=1")
