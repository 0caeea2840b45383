"""The oracle: a float32 loop over groups that multiplies every row by every group's weight and keeps its own.

Work grows with the number of groups; it is here to be right.
"""

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels.groups import row_groups
from moejax.kernels.kernel import Kernel
from moejax.kernels.operands import Product, WeightGradient
from moejax.varying import vary


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def gmm(call: Product, kernel: Kernel) -> jax.Array:
    """The product, [M, N]."""
    del kernel
    lhs, rhs, group_sizes, transpose_rhs, out_dtype = call
    num_rows, _, n, num_groups = call.sizes
    group_M = row_groups(group_sizes, num_rows)

    def body(group: jax.Array, out: jax.Array) -> jax.Array:
        product = _dot(lhs, lax.dynamic_index_in_dim(rhs, group, 0, keepdims=False), (1, 1 if transpose_rhs else 0))
        return jnp.where((group_M == group)[:, None], product, out)

    out = vary(jnp.zeros((num_rows, n), jnp.float32), call.axes)
    return lax.fori_loop(jnp.int32(0), jnp.int32(num_groups), body, out).astype(out_dtype)


def wgrad(call: WeightGradient, kernel: Kernel) -> jax.Array:
    """The weight gradient, [G, K, N]."""
    del kernel
    lhs, grad, group_sizes, _, _ = call
    num_rows, k, n, num_groups = call.sizes
    group_M = row_groups(group_sizes, num_rows)

    def body(group: jax.Array, total: jax.Array) -> jax.Array:
        mine = (group_M == group)[:, None]
        product = _dot(jnp.where(mine, lhs, 0), jnp.where(mine, grad, 0), (0, 0))
        return lax.dynamic_update_index_in_dim(total, product, group, 0)

    total = vary(jnp.zeros((num_groups, k, n), jnp.float32), call.axes)
    total = lax.fori_loop(jnp.int32(0), jnp.int32(num_groups), body, total)
    return call.result(total)
