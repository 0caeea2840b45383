"""The oracle: a float32 loop over groups that multiplies every row by every group's weight and keeps its own.

Work grows with the number of groups; it is here to be right.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from moejax.kernels.groups import row_groups
from moejax.varying import vary, varying_axes


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def gmm(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool, out_dtype: DTypeLike
) -> jax.Array:
    """Multiply rows of lhs [M, K] by their group's matrix: rhs [G, K, N], or [G, N, K] with `transpose_rhs`."""
    group_M = row_groups(group_sizes, lhs.shape[0])
    shape = (lhs.shape[0], rhs.shape[1] if transpose_rhs else rhs.shape[2])

    def body(group: jax.Array, out: jax.Array) -> jax.Array:
        product = _dot(lhs, lax.dynamic_index_in_dim(rhs, group, 0, keepdims=False), (1, 1 if transpose_rhs else 0))
        return jnp.where((group_M == group)[:, None], product, out)

    out = vary(jnp.zeros(shape, jnp.float32), varying_axes(lhs, rhs, group_sizes))
    return lax.fori_loop(jnp.int32(0), jnp.int32(rhs.shape[0]), body, out).astype(out_dtype)


def wgrad(
    lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array, *, out_dtype: DTypeLike, accumulator: jax.Array | None
) -> jax.Array:
    """Sum of lhs[row]^T grad[row] over each group's rows, [G, K, N]; added to a float32 `accumulator` if given."""
    group_M = row_groups(group_sizes, lhs.shape[0])
    num_groups = group_sizes.shape[0]

    def body(group: jax.Array, total: jax.Array) -> jax.Array:
        mine = (group_M == group)[:, None]
        product = _dot(jnp.where(mine, lhs, 0), jnp.where(mine, grad, 0), (0, 0))
        return lax.dynamic_update_index_in_dim(total, product, group, 0)

    total = jnp.zeros((num_groups, lhs.shape[1], grad.shape[1]), jnp.float32)
    total = vary(total, varying_axes(lhs, grad, group_sizes))
    total = lax.fori_loop(jnp.int32(0), jnp.int32(num_groups), body, total)
    return total.astype(out_dtype) if accumulator is None else accumulator + total
