"""What the model is."""

from dataclasses import dataclass, field
from typing import Literal

from moejax.config.checks import not_negative, positive, require
from moejax.config.moe import MoEModelConfig


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
        positive("model.attention", self, "num_heads", "num_kv_heads", "head_dim", "rope_theta")
        require(
            self.num_heads % self.num_kv_heads == 0,
            "model.attention.num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads={self.num_heads}",
        )
        require(self.head_dim % 2 == 0, "model.attention.head_dim", self.head_dim, "even (rotary embedding pairs dims)")


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
        require(
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
        positive("model.layers", self, "repeat")
        require(len(self.pattern) > 0, "model.layers.pattern", "[]", "a list of at least one layer")


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
        mtp: Modules of multi-token prediction, each a layer like the last one, that training predicts one token further
            ahead with; 0 for none. Evaluation and generation do without.
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
    mtp: int = 0
    init_std: float = 0.02
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        positive("model", self, "vocab_size", "d_model", "mlp_dim", "norm_eps", "init_std")
        require(len(self.layers) > 0, "model.layers", "[]", "a list of at least one group")
        not_negative("model", self, "mtp")

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """Every layer of the model, first to last."""
        return tuple(spec for group in self.layers for _ in range(group.repeat) for spec in group.pattern)

    @property
    def training_specs(self) -> tuple[LayerSpec, ...]:
        """The same, and behind them the layers of multi-token prediction."""
        return self.specs + self.specs[-1:] * self.mtp

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.specs)

    @property
    def num_moe_layers(self) -> int:
        """Number of layers with routed experts, without those of multi-token prediction."""
        return sum(spec.ffn == "moe" for spec in self.specs)

    @property
    def num_routers(self) -> int:
        """Number of layers with routed experts, with those of multi-token prediction."""
        return sum(spec.ffn == "moe" for spec in self.training_specs)
