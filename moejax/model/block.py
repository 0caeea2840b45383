"""One decoder layer: attention and an FFN, each behind an RMSNorm and added to the residual."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import Config, LayerSpec, ModelConfig
from moejax.model.parameters import weight
from moejax.moe.exchange import make_exchange
from moejax.moe.layer import moe_layer
from moejax.moe.statistics import Statistics
from moejax.nn.attention import attention
from moejax.nn.basic import rms_norm, rotary, swiglu


class Tokens(NamedTuple):
    """What a layer knows of its tokens, each [B, S] int32.

    Attributes:
        segments: Document inside the row, from 1; 0 is padding.
        positions: Position inside the document.
    """

    segments: jax.Array
    positions: jax.Array


class RMSNorm(nnx.Module):
    """RMSNorm with a learned scale."""

    def __init__(self, width: int, eps: float, dim: str = "norm"):
        self.scale = weight((width,), (dim,), 0.0)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last dim."""
        return rms_norm(x, self.scale[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions and optional QK norm."""

    def __init__(self, config: ModelConfig, window: int | None):
        a, width = config.attention, config.d_model
        out_std = config.init_std / (2 * config.num_layers) ** 0.5
        self.config, self.window = a, window
        self.query = weight((width, a.num_heads, a.head_dim), ("embed", "heads", "head_dim"), config.init_std)
        self.key = weight((width, a.num_kv_heads, a.head_dim), ("embed", "kv_heads", "head_dim"), config.init_std)
        self.value = weight((width, a.num_kv_heads, a.head_dim), ("embed", "kv_heads", "head_dim"), config.init_std)
        self.out = weight((a.num_heads, a.head_dim, width), ("heads", "head_dim", "embed"), out_std)
        if a.qk_norm != "none":
            full = a.qk_norm == "full"
            self.query_norm = RMSNorm(a.head_dim * (a.num_heads if full else 1), config.norm_eps)
            self.key_norm = RMSNorm(a.head_dim * (a.num_kv_heads if full else 1), config.norm_eps)

    def _norm(self, norm: RMSNorm, x_BSHd: jax.Array) -> jax.Array:
        if self.config.qk_norm == "head":
            return norm(x_BSHd)
        return norm(x_BSHd.reshape(*x_BSHd.shape[:2], -1)).reshape(x_BSHd.shape)

    def __call__(self, x_BSD: jax.Array, tokens: Tokens) -> jax.Array:
        """Attend within documents."""
        q = jnp.einsum("bsd,dhk->bshk", x_BSD, self.query[...])
        k = jnp.einsum("bsd,dhk->bshk", x_BSD, self.key[...])
        v = jnp.einsum("bsd,dhk->bshk", x_BSD, self.value[...])
        if self.config.qk_norm != "none":
            q, k = self._norm(self.query_norm, q), self._norm(self.key_norm, k)
        q = rotary(q, tokens.positions, self.config.rope_theta)
        k = rotary(k, tokens.positions, self.config.rope_theta)
        y = attention(q, k, v, tokens.segments, self.window)
        return jnp.einsum("bshk,hkd->bsd", y, self.out[...])


class MLP(nnx.Module):
    """Dense SwiGLU FFN."""

    def __init__(self, config: ModelConfig, hidden: int):
        width = config.d_model
        self.gate_up = weight((width, 2, hidden), ("embed", "gate_up", "mlp"), config.init_std)
        self.down = weight((hidden, width), ("mlp", "embed"), config.init_std / (2 * config.num_layers) ** 0.5)

    def __call__(self, x_BSD: jax.Array, tokens: Tokens) -> tuple[jax.Array, None]:
        """Apply to every token."""
        return swiglu(x_BSD, self.gate_up[...], self.down[...]), None


class MoE(nnx.Module):
    """Routed experts, and a shared expert that every token passes."""

    def __init__(self, config: Config):
        model, m, width = config.model, config.model.moe, config.model.d_model
        out_std = model.init_std / (2 * model.num_layers) ** 0.5
        self.config, self.exchange = m, make_exchange(config)
        self.router = weight((width, m.num_experts), ("embed", "router"), model.init_std)
        dims = ("experts", "expert_embed", "gate_up", "expert_mlp")
        self.gate_up = weight((m.num_experts, width, 2, m.expert_dim), dims, model.init_std)
        self.down = weight((m.num_experts, m.expert_dim, width), ("experts", "expert_mlp", "expert_embed"), out_std)
        self.shared = MLP(model, m.shared_dim) if m.shared_dim else None

    def __call__(self, x_BSD: jax.Array, tokens: Tokens) -> tuple[jax.Array, Statistics]:
        """Apply to every token that exists."""
        weights = (self.router[...], self.gate_up[...], self.down[...])
        y_BSD, statistics = moe_layer(x_BSD, tokens.segments > 0, *weights, self.config, self.exchange)
        if self.shared is not None:
            with jax.named_scope("shared"):
                y_BSD = y_BSD + self.shared(x_BSD, tokens)[0]
        return y_BSD, statistics


class Block(nnx.Module):
    """One layer."""

    def __init__(self, config: Config, spec: LayerSpec):
        model = config.model
        self.attention_norm = RMSNorm(model.d_model, model.norm_eps)
        self.attention = Attention(model, spec.window)
        self.ffn_norm = RMSNorm(model.d_model, model.norm_eps)
        self.ffn = MoE(config) if spec.ffn == "moe" else MLP(model, model.mlp_dim)

    def __call__(self, x_BSD: jax.Array, tokens: Tokens) -> tuple[jax.Array, Statistics | None]:
        """Return hidden states and, for MoE layers, statistics."""
        with jax.named_scope("attention"):
            x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), tokens)
        with jax.named_scope("ffn"):
            y_BSD, statistics = self.ffn(self.ffn_norm(x_BSD), tokens)
        return x_BSD + y_BSD, statistics
