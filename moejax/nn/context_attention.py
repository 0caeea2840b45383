"""Attention over sequences that are sharded along a mesh axis, inside `shard_map`.

*Ulysses* (Jacobs et al., 2023): an all-to-all gives each device some heads of the whole sequence, another one
brings results back. Two collectives whose bytes do not grow with the axis; the axis divides both numbers of
heads. *Ring*: see `moejax.nn.ring_attention`; any size, but keys and values pass every device.
"""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.nn.attention import attention
from moejax.nn.ring_attention import Ring, ring_attention


def context_attention(
    q_BsHd: jax.Array,
    k_BsKd: jax.Array,
    v_BsKd: jax.Array,
    segments_Bs: jax.Array,
    window: int | None,
    axis: str,
    size: int,
    kind: Literal["ulysses", "ring"],
) -> jax.Array:
    """Attention of each local token to tokens of its own segment at or before it, in all shards.

    Args:
        q_BsHd: Queries of the local tokens, H heads. Shards are contiguous, in the order of the axis.
        k_BsKd: Their keys, K heads; K divides H.
        v_BsKd: Their values.
        segments_Bs: Their documents, numbered within the whole sequence.
        window: Tokens that a token sees, itself included; None for all before it.
        axis: Mesh axis of the shards.
        size: Its size; with 1 this is `attention`.
        kind: How keys and values come to queries.

    Returns:
        [B, s, H, d]. Rows of padding (segment 0) see padding only and mean nothing.
    """
    if size == 1:
        return attention(q_BsHd, k_BsKd, v_BsKd, segments_Bs, window)
    if kind == "ring":
        return ring_attention(q_BsHd, k_BsKd, v_BsKd, segments_Bs, Ring(axis, size, window))
    chex.assert_is_divisible(k_BsKd.shape[2], size)
    num_heads, num_kv_heads = q_BsHd.shape[2] // size, k_BsKd.shape[2] // size
    by_device = [a.reshape(*a.shape[:2], size, -1, a.shape[3]) for a in (q_BsHd, k_BsKd, v_BsKd)]
    qkv_BsXd = jnp.concatenate(by_device, axis=3).reshape(*q_BsHd.shape[:2], -1, q_BsHd.shape[3])
    qkv_BSXd = lax.all_to_all(qkv_BsXd, axis, split_axis=2, concat_axis=1, tiled=True)
    qkv_BSXd = checkpoint_name(qkv_BSXd, "exchange")  # backward reads it; not saved, it would be sent again
    q, k, v = jnp.split(qkv_BSXd, [num_heads, num_heads + num_kv_heads], axis=2)
    segments_BS = lax.all_gather(segments_Bs, axis, axis=1, tiled=True)
    out_BSHd = attention(q, k, v, segments_BS, window)
    out_BsHd = lax.all_to_all(out_BSHd, axis, split_axis=1, concat_axis=2, tiled=True)
    return checkpoint_name(out_BsHd, "attention")
