"""Ring attention: keys and values of a sequence's shards go round, queries stay (Liu et al., 2023).

Backward sends keys and values round once more, with their gradients travelling beside them, and makes the
probabilities again from the logarithm of the softmax's sum, so that neither more than one block of keys and values
nor more than one block of scores is ever held. With a window, keys and values go only as far as it reaches.

Shards are contiguous, so the last one sees all blocks and the first one its own: the ring takes the time of C
blocks, of which half are seen. Letters as in `online_softmax`, and C shards.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.nn.online_softmax import Adjoint, Block, Queries, State, attend, attend_backward, merge, split
from moejax.varying import vary, varying_axes

Carry = TypeVar("Carry")


class Ring(NamedTuple):
    """How far the ring goes, and over what.

    Attributes:
        axis: Mesh axis of the sequence's shards.
        size: Its size C.
        window: Tokens that a token sees, itself included; None for all before it.
    """

    axis: str
    size: int
    window: int | None

    def blocks(self, length: int) -> int:
        """Blocks that a shard of `length` tokens may see, its own included: 1 to C."""
        if self.window is None:
            return self.size
        return min(self.size, 1 + -(-(self.window - 1) // length))

    def shift(self, x: jax.Array, by: int) -> jax.Array:
        """Send to the shard that is `by` places later."""
        return lax.ppermute(x, self.axis, [(i, (i + by) % self.size) for i in range(self.size)])

    def block(self, kv_2BsKd: jax.Array, segments_CBs: jax.Array, step: jax.Array | int) -> Block:
        """The block that is here after `step` steps."""
        me = lax.axis_index(self.axis)
        source = (me - step) % self.size
        return Block(kv_2BsKd, segments_CBs[source], (me - source) * kv_2BsKd.shape[2])


def ring_attention(
    q_BsHd: jax.Array, k_BsKd: jax.Array, v_BsKd: jax.Array, segments_Bs: jax.Array, ring: Ring
) -> jax.Array:
    """`moejax.nn.attention.attention` of a sequence whose shards lie along a mesh axis, inside `shard_map`.

    Args:
        q_BsHd: Queries of the local tokens.
        k_BsKd: Their keys.
        v_BsKd: Their values.
        segments_Bs: Their documents, numbered within the whole sequence.
        ring: Axis and window.
    """
    axes = varying_axes((q_BsHd, k_BsKd, v_BsKd, segments_Bs)) | {ring.axis}
    segments_CBs = vary(lax.all_gather(segments_Bs, ring.axis), axes)
    q_BsHd, segments_Bs, kv_2BsKd = vary((q_BsHd, segments_Bs, jnp.stack([k_BsKd, v_BsKd])), axes)
    return _ring(q_BsHd, kv_2BsKd, segments_Bs, segments_CBs, ring)


def _around(
    ring: Ring,
    kv_2BsKd: jax.Array,
    carry: Carry,
    visit: Callable[[Carry, jax.Array, Any], Carry],
    after: Callable[[Carry], Carry] = lambda carry: carry,
) -> Carry:
    """Let every block that may be seen visit every shard: `visit` in each step, `after` between steps.

    The next block is under way while the current one is computed with.
    """
    steps = ring.blocks(kv_2BsKd.shape[2])
    if steps > 1:

        def body(state: tuple[Carry, jax.Array], step: jax.Array) -> tuple[tuple[Carry, jax.Array], None]:
            carry, kv = state
            return (after(visit(carry, kv, step)), ring.shift(kv, 1)), None

        (carry, kv_2BsKd), _ = lax.scan(body, (carry, kv_2BsKd), jnp.arange(steps - 1, dtype=jnp.int32))
    return visit(carry, kv_2BsKd, steps - 1)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(
    q_BsHd: jax.Array, kv_2BsKd: jax.Array, segments_Bs: jax.Array, segments_CBs: jax.Array, ring: Ring
) -> jax.Array:
    return _forward(q_BsHd, kv_2BsKd, segments_Bs, segments_CBs, ring)[0]


def _forward(
    q_BsHd: jax.Array, kv_2BsKd: jax.Array, segments_Bs: jax.Array, segments_CBs: jax.Array, ring: Ring
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    # JAX takes what no layer changes out of a differentiated scan over layers: the masks of all steps at once, were
    # they not tied to the queries.
    queries = lax.optimization_barrier(Queries.make(q_BsHd, segments_Bs, kv_2BsKd.shape[3]))

    def visit(state: State, kv: jax.Array, step: Any) -> State:
        return attend(queries, ring.block(kv, segments_CBs, step), state, ring.window)

    out, logsum = _around(ring, kv_2BsKd, State.start(queries.q_PBQKGd), visit).finish()
    out_BsHd = checkpoint_name(merge(out, q_BsHd), "attention")
    logsum = checkpoint_name(logsum, "attention")
    return out_BsHd, (q_BsHd, kv_2BsKd, segments_Bs, segments_CBs, out_BsHd, logsum)


def _backward(
    ring: Ring, saved: tuple[jax.Array, ...], dout_BsHd: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    q_BsHd, kv_2BsKd, segments_Bs, segments_CBs, out_BsHd, logsum_PBKGQ = saved
    queries = Queries.make(q_BsHd, segments_Bs, kv_2BsKd.shape[3])
    out, dout = (split(a, kv_2BsKd.shape[3]) for a in (out_BsHd, dout_BsHd))
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    adjoint = Adjoint(dout, logsum_PBKGQ, jnp.moveaxis(delta, 2, 4))

    def visit(grads: tuple[jax.Array, jax.Array], kv: jax.Array, step: Any) -> tuple[jax.Array, jax.Array]:
        return attend_backward(queries, adjoint, ring.block(kv, segments_CBs, step), *grads, ring.window)

    def after(grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return grads[0], ring.shift(grads[1], 1)

    zeros = (jnp.zeros(a.shape, jnp.float32) for a in (queries.q_PBQKGd, kv_2BsKd))
    dq, dkv = _around(ring, kv_2BsKd, vary(tuple(zeros), varying_axes(q_BsHd)), visit, after)
    steps = ring.blocks(kv_2BsKd.shape[2])
    dkv = dkv.astype(kv_2BsKd.dtype)
    return merge(dq, q_BsHd), ring.shift(dkv, 1 - steps) if steps > 1 else dkv, None, None  # home


_ring.defvjp(_forward, _backward)
