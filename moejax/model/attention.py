"""Norm and attention of a decoder layer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.axes import CONTEXT
from moejax.config import Config
from moejax.errors import UserError
from moejax.model.parameters import weight
from moejax.model.tokens import Tokens
from moejax.nn.basic import rms_norm, rotary
from moejax.nn.context_attention import context_attention
from moejax.nn.linear import linear
from moejax.sharding import compute_axes
from moejax.varying import vary


class RMSNorm(nnx.Module):
    """RMSNorm with a learned scale."""

    def __init__(self, width: int, eps: float, dim: str = "norm"):
        self.scale = weight((width,), (dim,), 0.0)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last dim."""
        return rms_norm(x, self.scale[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions and optional QK norm; heads may be sharded over devices."""

    def __init__(self, run: Config, window: int | None):
        config = run.model
        self.context, self.how = run.mesh.context, run.context
        self.axes, self.kv_axes = compute_axes(run, "heads"), compute_axes(run, "kv_heads")
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
        self._check()

    def _check(self) -> None:
        rules = f"sharding.compute.heads={list(self.axes)}, kv_heads={list(self.kv_axes)}"
        if self.kv_axes not in ((), self.axes):
            raise UserError(f"{rules}: kv_heads must be sharded as heads, or not at all ([])")
        if self.config.qk_norm == "full" and self.axes:
            raise UserError(f"{rules}: model.attention.qk_norm=full is a norm over all heads; set both rules to []")

    @property
    def apart(self) -> bool:
        """Whether it needs no other device."""
        return self.context == 1 and not self.axes

    def _norm(self, norm: RMSNorm, x_BSHd: jax.Array) -> jax.Array:
        if self.config.qk_norm == "head":
            return norm(x_BSHd)
        return norm(x_BSHd.reshape(*x_BSHd.shape[:2], -1)).reshape(x_BSHd.shape)

    def _of_heads(self, kv_BSKd: jax.Array, num_heads: int) -> jax.Array:
        """Keys or values of this device's query heads; all are here if only query heads are sharded."""
        if self.kv_axes == self.axes:
            return kv_BSKd
        head = lax.axis_index(self.axes) * num_heads + jnp.arange(num_heads)
        return jnp.take(kv_BSKd, head // (self.config.num_heads // self.config.num_kv_heads), axis=2)

    def __call__(self, x_BSD: jax.Array, tokens: Tokens) -> jax.Array:
        """Attend within documents."""
        x_BSD = vary(x_BSD, self.axes)  # once, so that backward sums the gradients of query, key and value once
        q, k, v = (linear(x_BSD, w[...]) for w in (self.query, self.key, self.value))
        if self.config.qk_norm != "none":
            q, k = self._norm(self.query_norm, q), self._norm(self.key_norm, k)
        q = rotary(q, tokens.positions, self.config.rope_theta)
        k = rotary(k, tokens.positions, self.config.rope_theta)
        k, v = (self._of_heads(a, q.shape[2]) for a in (k, v))
        q, k, v = (checkpoint_name(a, "qkv") for a in (q, k, v))
        y = context_attention(q, k, v, tokens.segments, self.window, CONTEXT, self.context, self.how.attention)
        y_BSD = linear(y, self.out[...], contract=2)
        with jax.named_scope("tensor"):
            return lax.psum(y_BSD, self.axes) if self.axes else y_BSD
