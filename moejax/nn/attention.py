"""Causal grouped-query attention with document mask and sliding window.

Long sequences go in blocks of queries, one after the other, each recomputed in backward: scores take
[block, keys] memory instead of [S, S]. With a window, a block reads only the keys that it can see.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

QUERY_BLOCK = 512
"""Queries per block, in tokens."""


def _block(
    q: jax.Array, k: jax.Array, v: jax.Array, same: jax.Array, offset: jax.Array | int, window: int | None
) -> jax.Array:
    """Attention of queries to keys; `offset` is the place of the first query minus that of the first key."""
    distance = offset + jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None, :]
    mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    with jax.numpy_dtype_promotion("standard"):  # JAX's function promotes bfloat16 scores by itself
        return jax.nn.dot_product_attention(q, k, v, mask=(mask[None] & same)[:, None])


def attention(
    q_BSHd: jax.Array, k_BSKd: jax.Array, v_BSKd: jax.Array, segments_BS: jax.Array, window: int | None
) -> jax.Array:
    """Attention of each token to tokens of its own segment at or before it.

    Args:
        q_BSHd: Queries, H heads.
        k_BSKd: Keys, K heads; K divides H.
        v_BSKd: Values.
        segments_BS: Document index of each token; tokens see only their own document.
        window: Tokens that a token sees, itself included; None for all before it.

    Returns:
        [B, S, H, d]. Rows of padding (segment 0) see padding only and mean nothing.
    """
    batch, length, num_heads, width = q_BSHd.shape
    num_kv_heads = k_BSKd.shape[2]
    chex.assert_shape((k_BSKd, v_BSKd), (batch, length, num_kv_heads, width))
    chex.assert_shape(segments_BS, (batch, length))
    chex.assert_is_divisible(num_heads, num_kv_heads)
    if length <= QUERY_BLOCK:
        same = segments_BS[:, :, None] == segments_BS[:, None, :]
        return checkpoint_name(_block(q_BSHd, k_BSKd, v_BSKd, same, 0, window), "attention")

    num_keys = length if window is None else min(length, QUERY_BLOCK + window - 1)
    pad = -length % QUERY_BLOCK
    q_padded = jnp.pad(q_BSHd, ((0, 0), (0, pad), (0, 0), (0, 0)))
    segments_padded = jnp.pad(segments_BS, ((0, 0), (0, pad)))

    @partial(jax.checkpoint, prevent_cse=False)
    def one(start: jax.Array) -> jax.Array:
        low = jnp.clip(start + QUERY_BLOCK - num_keys, 0, length - num_keys)
        q = lax.dynamic_slice_in_dim(q_padded, start, QUERY_BLOCK, axis=1)
        k, v = (lax.dynamic_slice_in_dim(a, low, num_keys, axis=1) for a in (k_BSKd, v_BSKd))
        segment_q = lax.dynamic_slice_in_dim(segments_padded, start, QUERY_BLOCK, axis=1)
        segment_k = lax.dynamic_slice_in_dim(segments_BS, low, num_keys, axis=1)
        return _block(q, k, v, segment_q[:, :, None] == segment_k[:, None, :], start - low, window)

    blocks = lax.map(one, jnp.arange(0, length, QUERY_BLOCK))
    out = jnp.moveaxis(blocks, 0, 1).reshape(q_padded.shape)[:, :length]
    return checkpoint_name(out, "attention")
