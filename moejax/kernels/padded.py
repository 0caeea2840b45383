"""Grouped matmul as a batched matmul of static capacity: the control that the other backends are compared with.

Every group is copied into `max_group_size` rows. Rows of a group beyond that are zero in every direction.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from moejax.kernels.groups import bounds, row_groups
from moejax.kernels.kernel import Kernel


def _precision(dtype: DTypeLike) -> lax.Precision | None:
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _pack(rows: jax.Array, group_sizes: jax.Array, capacity: int) -> jax.Array:
    """Rows [M, K] by group, zero where a group has fewer: [G, capacity, K]."""
    start, end = bounds(group_sizes)
    index = start[:, None] + jnp.arange(capacity, dtype=jnp.int32)
    return jnp.where((index < end[:, None])[..., None], jnp.take(rows, index, axis=0, mode="clip"), 0)


def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool,
    out_dtype: DTypeLike,
    kernel: Kernel,
) -> jax.Array:
    """Multiply rows of lhs [M, K] by their group's matrix: rhs [G, K, N], or [G, N, K] with `transpose_rhs`."""
    num_rows, capacity = lhs.shape[0], kernel.max_group_size or max(lhs.shape[0], 1)
    dims = (((2,), (2 if transpose_rhs else 1,)), ((0,), (0,)))
    packed = _pack(lhs, group_sizes, capacity)
    out = lax.dot_general(packed, rhs, dims, _precision(lhs.dtype), jnp.float32).astype(out_dtype)
    group = row_groups(group_sizes, num_rows)
    own = jnp.minimum(group, rhs.shape[0] - 1)
    slot = jnp.arange(num_rows, dtype=jnp.int32) - bounds(group_sizes).start[own]
    kept = (group < rhs.shape[0]) & (slot < capacity)
    return jnp.where(kept[:, None], out[own, jnp.minimum(slot, capacity - 1)], 0)


def wgrad(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: DTypeLike,
    accumulator: jax.Array | None,
    kernel: Kernel,
) -> jax.Array:
    """Sum of lhs[row]^T grad[row] over each group's rows, [G, K, N]; added to a float32 `accumulator` if given."""
    capacity = kernel.max_group_size or max(lhs.shape[0], 1)
    packed_lhs, packed_grad = (_pack(rows, group_sizes, capacity) for rows in (lhs, grad))
    total = lax.dot_general(packed_lhs, packed_grad, (((1,), (1,)), ((0,), (0,))), _precision(lhs.dtype), jnp.float32)
    return total.astype(out_dtype) if accumulator is None else accumulator + total
