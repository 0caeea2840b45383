"""RMSNorm, rotary embedding and the SwiGLU feed-forward network."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last dim in float32 (Zhang and Sennrich, 2019); returns the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(variance + eps) * scale.astype(jnp.float32)).astype(x.dtype)


def rotary(x_BSHd: jax.Array, positions_BS: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding (Su et al., 2021), half-split pairs as Hugging Face models store them."""
    half = x_BSHd.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BS[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x_BSHd.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSHd.dtype)


def swiglu(x: jax.Array, gate_up_D2F: jax.Array, down_FD: jax.Array) -> jax.Array:
    """Dense FFN `(silu(x W_gate) * x W_up) W_down` (Shazeer, 2020); gate and up are one matmul, [D, 2, F]."""
    hidden = jnp.einsum("...d,dgf->...gf", x, gate_up_D2F)
    return (jax.nn.silu(hidden[..., 0, :]) * hidden[..., 1, :]) @ down_FD
