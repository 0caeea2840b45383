"""Grouped matmul by `lax.ragged_dot_general`: native on some TPUs, expanded densely elsewhere."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from moejax.kernels.groups import live_rows


def _precision(dtype: DTypeLike) -> lax.Precision | None:
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _mask(array: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return jnp.where(live_rows(group_sizes, array.shape[0])[:, None], array, 0)


def gmm(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool, out_dtype: DTypeLike
) -> jax.Array:
    """Multiply rows of lhs [M, K] by their group's matrix: rhs [G, K, N], or [G, N, K] with `transpose_rhs`."""
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transpose_rhs else 1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    out = lax.ragged_dot_general(
        _mask(lhs, group_sizes), rhs, group_sizes, dims, _precision(lhs.dtype), preferred_element_type=jnp.float32
    )
    return _mask(out, group_sizes).astype(out_dtype)


def wgrad(
    lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array, *, out_dtype: DTypeLike, accumulator: jax.Array | None
) -> jax.Array:
    """Sum of lhs[row]^T grad[row] over each group's rows, [G, K, N]; added to a float32 `accumulator` if given."""
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    lhs, grad = _mask(lhs, group_sizes), _mask(grad, group_sizes)
    total = lax.ragged_dot_general(
        lhs, grad, group_sizes, dims, _precision(lhs.dtype), preferred_element_type=jnp.float32
    )
    return total.astype(out_dtype) if accumulator is None else accumulator + total
