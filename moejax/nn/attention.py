"""Causal grouped-query attention with document mask and sliding window.

Queries go in blocks, each against only the keys that it can see, so scores take
[block, keys] memory instead of [S, S], and no work is done above the causal diagonal.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

QUERY_BLOCK = 512
"""Queries per block, in tokens."""


def _block(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_q: jax.Array, segment_k: jax.Array, start: int, low: int, window: int | None
) -> jax.Array:
    row = start + jnp.arange(q.shape[1])[:, None]
    column = low + jnp.arange(k.shape[1])[None, :]
    mask = column <= row
    if window is not None:
        mask &= column > row - window
    mask = mask[None] & (segment_q[:, :, None] == segment_k[:, None, :])
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])


def attention(q_BSHd: jax.Array, k_BSKd: jax.Array, v_BSKd: jax.Array, segments_BS: jax.Array, window: int | None) -> jax.Array:
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
    length = q_BSHd.shape[1]
    out = []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        low = 0 if window is None else max(0, start - window + 1)
        block = _block
        if length > QUERY_BLOCK:  # keep no scores for backward
            block = jax.checkpoint(_block, static_argnums=(5, 6, 7))
        rows, keys = slice(start, stop), slice(low, stop)
        out.append(
            block(q_BSHd[:, rows], k_BSKd[:, keys], v_BSKd[:, keys], segments_BS[:, rows], segments_BS[:, keys], start, low, window)
        )
    return checkpoint_name(jnp.concatenate(out, axis=1), "attention")
