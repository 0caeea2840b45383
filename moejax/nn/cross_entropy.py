"""Cross-entropy that never holds [tokens, vocabulary] in float32.

Tokens go in chunks. The forward pass of a differentiated call computes the gradients too, so logits
are made once; they are linear in the (scalar) cotangent, which backward multiplies in.
"""

import functools

import chex
import jax
import jax.numpy as jnp

from moejax.varying import vary, varying_axes

CHUNK = 1024
"""Tokens per chunk."""


def _chunks(x_TD: jax.Array, target_T: jax.Array, valid_T: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    tokens = x_TD.shape[0]
    size = min(CHUNK, tokens)
    pad = -tokens % size
    x = jnp.pad(x_TD, ((0, pad), (0, 0))).reshape(-1, size, x_TD.shape[1])
    return x, jnp.pad(target_T, (0, pad)).reshape(-1, size), jnp.pad(valid_T, (0, pad)).reshape(-1, size)


def _chunk_loss(x: jax.Array, head_DV: jax.Array, target: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = jnp.dot(x, head_DV, preferred_element_type=jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
    is_target = target[:, None] == jnp.arange(logits.shape[-1])
    dlogits = jnp.where(valid[:, None], jnp.exp(logits - lse[:, None]) - is_target.astype(jnp.float32), 0.0)
    return jnp.sum(jnp.where(valid, lse - picked, 0.0)), dlogits


@functools.partial(jax.custom_vjp)
def _loss(x_TD: jax.Array, head_DV: jax.Array, target_T: jax.Array, valid_T: jax.Array) -> jax.Array:
    chunks = _chunks(x_TD, target_T, valid_T)
    return jnp.sum(jax.lax.map(lambda chunk: _chunk_loss(chunk[0], head_DV, *chunk[1:])[0], chunks))


def _forward(x_TD, head_DV, target_T, valid_T):  # type: ignore[no-untyped-def]
    def one(dhead, chunk):  # type: ignore[no-untyped-def]
        x, target, valid = chunk
        loss, dlogits = _chunk_loss(x, head_DV, target, valid)
        dlogits = dlogits.astype(x.dtype)
        dx = jnp.dot(dlogits, head_DV.T)
        return dhead + jnp.dot(x.T, dlogits, preferred_element_type=jnp.float32), (loss, dx)

    axes = varying_axes(x_TD, head_DV, target_T, valid_T)
    dhead = vary(jnp.zeros(head_DV.shape, jnp.float32), axes)
    dhead, (losses, dx) = jax.lax.scan(one, dhead, _chunks(x_TD, target_T, valid_T))
    return jnp.sum(losses), (dx.reshape(-1, x_TD.shape[1])[: x_TD.shape[0]], dhead.astype(head_DV.dtype))


def _backward(residuals, g):  # type: ignore[no-untyped-def]
    dx, dhead = residuals
    return dx * g.astype(dx.dtype), dhead * g.astype(dhead.dtype), None, None


_loss.defvjp(_forward, _backward)


def cross_entropy(x_TD: jax.Array, head_DV: jax.Array, target_T: jax.Array, valid_T: jax.Array) -> jax.Array:
    """Sum over valid tokens of the cross-entropy in nats, float32.

    Args:
        x_TD: Final hidden states.
        head_DV: Output projection.
        target_T: Ids of the next tokens, int32.
        valid_T: Which tokens count; the others have zero loss and zero gradient.
    """
    tokens, width = x_TD.shape
    chex.assert_shape(head_DV, (width, None))
    chex.assert_shape((target_T, valid_T), (tokens,))
    x_TD = jnp.where(valid_T[:, None], x_TD, 0)  # padding may hold anything: 0 * NaN would spoil dW
    axes = varying_axes(x_TD, head_DV, target_T, valid_T)
    return _loss(*vary((x_TD, head_DV, target_T, valid_T), axes))
