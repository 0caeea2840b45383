"""Grouped matmul as a batched matmul of static capacity: the control that the other backends are compared with.

Every group is copied into `max_group_size` rows. Rows of a group beyond that are zero in every direction.
"""

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels.groups import bounds, row_groups
from moejax.kernels.kernel import Kernel
from moejax.kernels.operands import Product, WeightGradient, precision


def _pack(rows: jax.Array, group_sizes: jax.Array, capacity: int) -> jax.Array:
    """Rows [M, K] by group, zero where a group has fewer: [G, capacity, K]."""
    start, end = bounds(group_sizes)
    index = start[:, None] + jnp.arange(capacity, dtype=jnp.int32)
    return jnp.where((index < end[:, None])[..., None], jnp.take(rows, index, axis=0, mode="clip"), 0)


def gmm(call: Product, kernel: Kernel) -> jax.Array:
    """The product, [M, N]."""
    lhs, rhs, group_sizes, transpose_rhs, out_dtype = call
    num_rows, _, _, num_groups = call.sizes
    capacity = kernel.max_group_size or num_rows
    dims = (((2,), (2 if transpose_rhs else 1,)), ((0,), (0,)))
    packed = _pack(lhs, group_sizes, capacity)
    out = lax.dot_general(packed, rhs, dims, precision(lhs.dtype), jnp.float32).astype(out_dtype)
    group = row_groups(group_sizes, num_rows)
    own = jnp.minimum(group, num_groups - 1)
    slot = jnp.arange(num_rows, dtype=jnp.int32) - bounds(group_sizes).start[own]
    kept = (group < num_groups) & (slot < capacity)
    return jnp.where(kept[:, None], out[own, jnp.minimum(slot, capacity - 1)], 0)


def wgrad(call: WeightGradient, kernel: Kernel) -> jax.Array:
    """The weight gradient, [G, K, N]."""
    lhs, grad, group_sizes, _, _ = call
    capacity = kernel.max_group_size or lhs.shape[0]
    packed_lhs, packed_grad = (_pack(rows, group_sizes, capacity) for rows in (lhs, grad))
    total = lax.dot_general(packed_lhs, packed_grad, (((1,), (1,)), ((0,), (0,))), precision(lhs.dtype), jnp.float32)
    return call.result(total)
