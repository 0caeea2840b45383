"""Cross-entropy that never holds [tokens, vocabulary] in float32.

Tokens go in chunks. The forward pass of a differentiated call computes the gradients too, so logits
are made once; they are linear in the (scalar) cotangent, which backward multiplies in. The vocabulary may be
sharded: three numbers a token are reduced over the shards, and its logits are nowhere together.
"""

import functools

import chex
import jax
import jax.numpy as jnp
from jax import lax

from moejax.varying import vary, varying_axes

CHUNK = 1024
"""Tokens per chunk."""

Axes = tuple[str, ...]


def _chunks(x_TD: jax.Array, target_T: jax.Array, valid_T: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    tokens = x_TD.shape[0]
    size = min(CHUNK, tokens)
    pad = -tokens % size
    x = jnp.pad(x_TD, ((0, pad), (0, 0))).reshape(-1, size, x_TD.shape[1])
    return x, jnp.pad(target_T, (0, pad)).reshape(-1, size), jnp.pad(valid_T, (0, pad)).reshape(-1, size)


def _chunk_loss(
    x: jax.Array, head_DV: jax.Array, target: jax.Array, valid: jax.Array, axes: Axes
) -> tuple[jax.Array, jax.Array]:
    logits = jnp.dot(x, head_DV, preferred_element_type=jnp.float32)
    first = lax.axis_index(axes) * logits.shape[-1] if axes else 0
    is_target = (target - first)[:, None] == jnp.arange(logits.shape[-1])
    largest = jnp.max(logits, axis=-1)
    largest = lax.pmax(largest, axes) if axes else largest
    exps = jnp.exp(logits - largest[:, None])
    sums = jnp.stack([jnp.sum(exps, axis=-1), jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)])
    total, picked = lax.psum(sums, axes) if axes else sums
    dlogits = jnp.where(valid[:, None], exps / total[:, None] - is_target.astype(jnp.float32), 0.0)
    return jnp.sum(jnp.where(valid, jnp.log(total) + largest - picked, 0.0)), dlogits


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss(x_TD: jax.Array, head_DV: jax.Array, target_T: jax.Array, valid_T: jax.Array, axes: Axes) -> jax.Array:
    chunks = _chunks(x_TD, target_T, valid_T)
    return jnp.sum(lax.map(lambda chunk: _chunk_loss(chunk[0], head_DV, chunk[1], chunk[2], axes)[0], chunks))


def _forward(x_TD, head_DV, target_T, valid_T, axes):  # type: ignore[no-untyped-def]
    def one(dhead, chunk):  # type: ignore[no-untyped-def]
        x, target, valid = chunk
        loss, dlogits = _chunk_loss(x, head_DV, target, valid, axes)
        dlogits = dlogits.astype(x.dtype)
        dx = jnp.dot(dlogits, head_DV.T)
        return dhead + jnp.dot(x.T, dlogits, preferred_element_type=jnp.float32), (loss, dx)

    dhead = vary(jnp.zeros(head_DV.shape, jnp.float32), varying_axes(x_TD, head_DV, target_T, valid_T))
    dhead, (losses, dx) = lax.scan(one, dhead, _chunks(x_TD, target_T, valid_T))
    dx = dx.reshape(-1, x_TD.shape[1])[: x_TD.shape[0]]
    return jnp.sum(losses), (lax.psum(dx, axes) if axes else dx, dhead.astype(head_DV.dtype))


def _backward(axes, residuals, g):  # type: ignore[no-untyped-def]
    dx, dhead = residuals
    return dx * g.astype(dx.dtype), dhead * g.astype(dhead.dtype), None, None


_loss.defvjp(_forward, _backward)


def cross_entropy(
    x_TD: jax.Array, head_DV: jax.Array, target_T: jax.Array, valid_T: jax.Array, axes: Axes = ()
) -> jax.Array:
    """Sum over valid tokens of the cross-entropy in nats, float32.

    Args:
        x_TD: Final hidden states.
        head_DV: Output projection, or this device's shard of its vocabulary.
        target_T: Ids of the next tokens, int32.
        valid_T: Which tokens count; the others have zero loss and zero gradient.
        axes: Mesh axes that shard the vocabulary; hidden states and result are the same along them.
    """
    tokens, width = x_TD.shape
    chex.assert_shape(head_DV, (width, None))
    chex.assert_shape((target_T, valid_T), (tokens,))
    x_TD = jnp.where(valid_T[:, None], x_TD, 0)  # padding may hold anything: 0 * NaN would spoil dW
    varying = varying_axes(x_TD, head_DV, target_T, valid_T)
    x_TD, target_T, valid_T = vary((x_TD, target_T, valid_T), varying - set(axes))
    return _loss(x_TD, vary(head_DV, varying), target_T, valid_T, axes)
