"""One decoder layer: attention and an FFN, each behind an RMSNorm and added to the residual."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.axes import CONTEXT
from moejax.config import Config, LayerSpec, ModelConfig
from moejax.model.parameters import ZEROS, weight
from moejax.moe.exchange import make_exchange
from moejax.moe.experts import ExpertWeights
from moejax.moe.layer import moe_layer
from moejax.moe.router import RouterWeights
from moejax.moe.statistics import Statistics
from moejax.nn.activations import activate, num_inner
from moejax.nn.basic import rms_norm, rotary
from moejax.nn.context_attention import context_attention


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

    def __init__(self, run: Config, window: int | None):
        config, self.context = run.model, (run.mesh.context, run.context.attention)
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
        y = context_attention(q, k, v, tokens.segments, self.window, CONTEXT, *self.context)
        return jnp.einsum("bshk,hkd->bsd", y, self.out[...])


class MLP(nnx.Module):
    """Dense FFN."""

    def __init__(self, config: ModelConfig, hidden: int, activation: str = "swiglu"):
        width, self.activation = config.d_model, activation
        self.gate_up = weight((width, num_inner(activation), hidden), ("embed", "gate_up", "mlp"), config.init_std)
        self.down = weight((hidden, width), ("mlp", "embed"), config.init_std / (2 * config.num_layers) ** 0.5)

    def __call__(self, x_BSD: jax.Array, tokens: Tokens) -> tuple[jax.Array, None]:
        """Apply to every token."""
        hidden = jnp.einsum("bsd,dgf->bsgf", x_BSD, self.gate_up[...])
        hidden = activate(hidden.reshape(-1, *hidden.shape[2:]), self.activation)
        return (hidden @ self.down[...]).reshape(x_BSD.shape), None


def _values(*params: nnx.Param | None) -> list[Any]:
    return [None if param is None else param[...] for param in params]


class Latent(nnx.Module):
    """Projections around the experts of a latent MoE."""

    def __init__(self, model: ModelConfig):
        width, latent = model.d_model, model.moe.latent_dim
        self.down = weight((width, latent), ("embed", "latent"), model.init_std)
        self.up = weight((latent, width), ("latent", "embed"), model.init_std / (2 * model.num_layers) ** 0.5)
        self.norm = RMSNorm(latent, model.norm_eps) if model.moe.latent_norm else None

    def enter(self, x_BSD: jax.Array) -> jax.Array:
        """To the width of the experts."""
        x_BSL = x_BSD @ self.down[...]
        return x_BSL if self.norm is None else self.norm(x_BSL)

    def leave(self, y_BSL: jax.Array) -> jax.Array:
        """Back to the width of the model."""
        return y_BSL @ self.up[...]


class MoE(nnx.Module):
    """Routed experts, and a shared expert that every token passes."""

    def __init__(self, config: Config):
        model, m = config.model, config.model.moe
        self.config, self.exchange = config, make_exchange(config)
        self.router = weight((model.d_model, m.num_experts), ("embed", "router"), model.init_std)
        self.router_bias = weight((m.num_experts,), ("router",), ZEROS) if m.router_bias else None
        self.router_scale = weight((model.d_model,), ("norm",), 0.0) if m.router_scale else None
        self.selection_bias = weight((m.num_experts,), ("router",), ZEROS) if m.selection_bias else None
        self._make_experts(model)
        self.latent = Latent(model) if m.latent_dim else None
        self.shared = MLP(model, m.shared_dim, m.activation) if m.shared_dim else None
        self.shared_gate = weight((model.d_model,), ("embed",), model.init_std) if m.shared_gate else None

    def _make_experts(self, model: ModelConfig) -> None:
        m, width = model.moe, model.moe.latent_dim or model.d_model
        count, inner, hidden = m.num_experts, num_inner(m.activation), m.expert_dim
        out_std = model.init_std / (2 * model.num_layers) ** 0.5
        dims = ("experts", "expert_embed", "gate_up", "expert_mlp")
        self.gate_up = weight((count, width, inner, hidden), dims, model.init_std)
        self.down = weight((count, hidden, width), ("experts", "expert_mlp", "expert_embed"), out_std)
        biased = m.expert_bias
        self.gate_up_bias = weight((count, inner * hidden), ("experts", "expert_mlp"), ZEROS) if biased else None
        self.down_bias = weight((count, width), ("experts", "expert_embed"), ZEROS) if biased else None

    def __call__(self, x_BSD: jax.Array, tokens: Tokens) -> tuple[jax.Array, Statistics]:
        """Apply to every token that exists."""
        inner = x_BSD if self.latent is None else self.latent.enter(x_BSD)
        router = RouterWeights(*_values(self.router, self.router_bias, self.router_scale, self.selection_bias))
        weights = ExpertWeights(*_values(self.gate_up, self.down, self.gate_up_bias, self.down_bias))
        y_BSD, statistics = moe_layer(x_BSD, inner, tokens.segments > 0, router, weights, self.config, self.exchange)
        if self.latent is not None:
            y_BSD = self.latent.leave(y_BSD)
        if self.shared is not None:
            with jax.named_scope("shared"):
                y_BSD = y_BSD + self._shared(x_BSD, tokens)
        return y_BSD, statistics

    def _shared(self, x_BSD: jax.Array, tokens: Tokens) -> jax.Array:
        assert self.shared is not None
        gain = jnp.asarray(self.config.model.moe.shared_gain, x_BSD.dtype)
        if self.shared_gate is not None:
            gain = gain * jax.nn.sigmoid(x_BSD @ self.shared_gate[...])[..., None]
        return self.shared(x_BSD, tokens)[0] * gain


class Block(nnx.Module):
    """One layer."""

    def __init__(self, config: Config, spec: LayerSpec):
        model = config.model
        self.attention_norm = RMSNorm(model.d_model, model.norm_eps)
        self.attention = Attention(config, spec.window)
        self.ffn_norm = RMSNorm(model.d_model, model.norm_eps)
        self.ffn = MoE(config) if spec.ffn == "moe" else MLP(model, model.mlp_dim)
        branch = model.moe.dense_dim if spec.ffn == "moe" else 0
        self.dense_norm = RMSNorm(model.d_model, model.norm_eps) if branch else None
        self.dense = MLP(model, branch) if branch else None

    def __call__(self, x_BSD: jax.Array, tokens: Tokens) -> tuple[jax.Array, Statistics | None]:
        """Return hidden states and, for MoE layers, statistics."""
        with jax.named_scope("attention"):
            x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), tokens)
        with jax.named_scope("ffn"):
            y_BSD, statistics = self.ffn(self.ffn_norm(x_BSD), tokens)
        if self.dense is not None and self.dense_norm is not None:
            with jax.named_scope("dense"):
                y_BSD = y_BSD + self.dense(self.dense_norm(x_BSD), tokens)[0]
        return x_BSD + y_BSD, statistics
