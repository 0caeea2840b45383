"""Attention of all local queries to one block of keys and values at a time, forward and backward, in float32.

Softmax is computed online: a running maximum, a running sum, an unnormalised output (Milakov and Gimelshein,
2018; Dao et al., 2022). Queries go in blocks too, and a block of them that sees none of the keys does no matmul.

Letters: B, s, H, d sequences, local tokens, query heads and their width; K key-value heads, which G = H / K query
heads share; P blocks of Q queries.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.nn import attention
from moejax.varying import vary, varying_axes


class Queries(NamedTuple):
    """The local queries in blocks, of which the last is filled up.

    Attributes:
        q_PBQKGd: Queries.
        segments_PBQ: Their documents.
        start_P: Local index of the first of each block.
    """

    q_PBQKGd: jax.Array
    segments_PBQ: jax.Array
    start_P: jax.Array

    @classmethod
    def make(cls, q_BsHd: jax.Array, segments_Bs: jax.Array, num_kv_heads: int) -> "Queries":
        """Blocks of `attention.QUERY_BLOCK`."""
        q = split(q_BsHd, num_kv_heads)
        start = jnp.arange(q.shape[0], dtype=jnp.int32) * q.shape[2]
        return cls(q, _split(segments_Bs), vary(start, varying_axes(q)))


class Block(NamedTuple):
    """One block of keys and values.

    Attributes:
        kv_2BsKd: Keys, and values.
        segments_Bs: Their documents.
        distance: Tokens from the first key to the first local query; negative if the keys come later.
    """

    kv_2BsKd: jax.Array
    segments_Bs: jax.Array
    distance: jax.Array


class State(NamedTuple):
    """The softmax so far, float32: maximum and sum [P, B, K, G, Q], output times sum [P, B, Q, K, G, d]."""

    top: jax.Array
    total: jax.Array
    out: jax.Array

    @classmethod
    def start(cls, q_PBQKGd: jax.Array) -> "State":
        """Nothing seen yet."""
        out = vary(jnp.zeros(q_PBQKGd.shape, jnp.float32), varying_axes(q_PBQKGd))
        total = jnp.moveaxis(out[..., 0], 2, 4)
        return cls(total - jnp.inf, total, out)

    def finish(self) -> tuple[jax.Array, jax.Array]:
        """Outputs, and the logarithm of the softmax's sum, which is 0 for rows that saw nothing."""
        total = jnp.where(self.total > 0, self.total, 1.0)
        out = self.out / jnp.moveaxis(total, 4, 2)[..., None]
        return out, jnp.where(self.total > 0, self.top + jnp.log(total), 0.0)


def _split(x_BsX: jax.Array) -> jax.Array:
    batch, length = x_BsX.shape[:2]
    size = min(length, attention.QUERY_BLOCK)
    x_BsX = jnp.pad(x_BsX, ((0, 0), (0, -length % size), *[(0, 0)] * (x_BsX.ndim - 2)))
    return jnp.moveaxis(x_BsX.reshape(batch, -1, size, *x_BsX.shape[2:]), 1, 0)


def split(x_BsHd: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, s, H, d] to blocks [P, B, Q, K, G, d]."""
    x_PBQHd = _split(x_BsHd)
    return x_PBQHd.reshape(*x_PBQHd.shape[:3], num_kv_heads, -1, x_PBQHd.shape[-1])


def merge(x_PBQKGd: jax.Array, like_BsHd: jax.Array) -> jax.Array:
    """Blocks to the shape and type of `like_BsHd`."""
    batch, length = like_BsHd.shape[:2]
    x_BPQKGd = jnp.moveaxis(x_PBQKGd, 0, 1)
    return x_BPQKGd.reshape(batch, -1, *like_BsHd.shape[2:])[:, :length].astype(like_BsHd.dtype)


def _scores(one: Queries, block: Block, window: int | None) -> tuple[jax.Array, jax.Array]:
    """Scaled scores [B, K, G, Q, s] of one block of queries, and which of them are seen [B, 1, 1, Q, s]."""
    q, k = one.q_PBQKGd, block.kv_2BsKd[0]
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k, preferred_element_type=jnp.float32)
    distance = block.distance + one.start_P + jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None, :]
    mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    same = one.segments_PBQ[:, :, None] == block.segments_Bs[:, None, :]
    return scores * jnp.float32(q.shape[-1] ** -0.5), (mask[None] & same)[:, None, None]


def _any_seen(one: Queries, block: Block, window: int | None) -> jax.Array:
    """Whether order and window let any of the queries see any of the keys."""
    nearest = block.distance + one.start_P + one.q_PBQKGd.shape[1] - 1
    if window is None:
        return nearest >= 0
    return (nearest >= 0) & (block.distance + one.start_P - (block.segments_Bs.shape[1] - 1) < window)


def _over_blocks(body: Any, carry: Any, xs: Any) -> tuple[Any, Any]:
    """`lax.scan` over blocks of queries, without a loop if there is one."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return lax.scan(body, carry, xs)
    carry, ys = body(carry, jax.tree.map(lambda a: a[0], xs))
    return carry, jax.tree.map(lambda a: a[None], ys)


def attend(queries: Queries, block: Block, state: State, window: int | None) -> State:
    """`state` after one more block of keys and values."""

    def seen(one: Queries, state: State) -> State:
        scores, mask = _scores(one, block, window)
        top = jnp.maximum(state.top, jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1))
        base = jnp.where(jnp.isfinite(top), top, 0.0)  # a row that has seen nothing yet
        probs, decay = jnp.where(mask, jnp.exp(scores - base[..., None]), 0.0), jnp.exp(state.top - base)
        v = block.kv_2BsKd[1]
        out = jnp.einsum("bkgqs,bskd->bqkgd", probs.astype(v.dtype), v, preferred_element_type=jnp.float32)
        out = out + state.out * jnp.moveaxis(decay, 3, 1)[..., None]
        return State(top, state.total * decay + jnp.sum(probs, axis=-1), out)

    def body(_: None, x: tuple[Queries, State]) -> tuple[None, State]:
        return None, lax.cond(_any_seen(x[0], block, window), seen, lambda _, state: state, *x)

    return _over_blocks(body, None, (queries, state))[1]


class Adjoint(NamedTuple):
    """What backward knows of the local queries, in blocks.

    Attributes:
        dout_PBQKGd: Gradient of the output.
        logsum_PBKGQ: Logarithm of the softmax's sum.
        delta_PBKGQ: Product of output and its gradient, summed over the head's width.
    """

    dout_PBQKGd: jax.Array
    logsum_PBKGQ: jax.Array
    delta_PBKGQ: jax.Array


def attend_backward(
    queries: Queries, adjoint: Adjoint, block: Block, dq_PBQKGd: jax.Array, dkv_2BsKd: jax.Array, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Gradients of queries, and of keys and values, float32, with those of this block added.

    With p the probabilities and dp the gradient of them, the scores' gradient is p (dp - delta).
    """
    k, v = block.kv_2BsKd

    def seen(one: Queries, adjoint: Adjoint, dq: jax.Array, dkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores, mask = _scores(one, block, window)
        probs = jnp.where(mask, jnp.exp(scores - adjoint.logsum_PBKGQ[..., None]), 0.0)
        dout, q = adjoint.dout_PBQKGd, one.q_PBQKGd
        dprobs = jnp.einsum("bqkgd,bskd->bkgqs", dout, v, preferred_element_type=jnp.float32)
        dscores = probs * (dprobs - adjoint.delta_PBKGQ[..., None]) * jnp.float32(q.shape[-1] ** -0.5)
        dscores, probs = dscores.astype(q.dtype), probs.astype(q.dtype)
        dq = dq + jnp.einsum("bkgqs,bskd->bqkgd", dscores, k, preferred_element_type=jnp.float32)
        dk = jnp.einsum("bkgqs,bqkgd->bskd", dscores, q, preferred_element_type=jnp.float32)
        dv = jnp.einsum("bkgqs,bqkgd->bskd", probs, dout, preferred_element_type=jnp.float32)
        return dq, dkv + jnp.stack([dk, dv])

    def body(dkv: jax.Array, x: tuple[Queries, Adjoint, jax.Array]) -> tuple[jax.Array, jax.Array]:
        some = _any_seen(x[0], block, window)
        dq, dkv = lax.cond(some, seen, lambda _one, _adjoint, dq, dkv: (dq, dkv), *x, dkv)
        return dkv, dq

    dkv, dq = _over_blocks(body, dkv_2BsKd, (queries, adjoint, dq_PBQKGd))
    return dq, dkv
