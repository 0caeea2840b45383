"""Grouped matmul by `lax.ragged_dot_general`: native on some TPUs, expanded densely elsewhere."""

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels.groups import live_rows
from moejax.kernels.kernel import Kernel
from moejax.kernels.operands import Product, WeightGradient, precision


def _mask(array: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return jnp.where(live_rows(group_sizes, array.shape[0])[:, None], array, 0)


def gmm(call: Product, kernel: Kernel) -> jax.Array:
    """The product, [M, N]."""
    del kernel
    lhs, rhs, group_sizes, transpose_rhs, out_dtype = call
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transpose_rhs else 1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    out = lax.ragged_dot_general(
        _mask(lhs, group_sizes), rhs, group_sizes, dims, precision(lhs.dtype), preferred_element_type=out_dtype
    )
    return _mask(out, group_sizes)


def wgrad(call: WeightGradient, kernel: Kernel) -> jax.Array:
    """The weight gradient, [G, K, N]."""
    del kernel
    lhs, grad, group_sizes, out_dtype, _ = call
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    lhs, grad = _mask(lhs, group_sizes), _mask(grad, group_sizes)
    total = lax.ragged_dot_general(  # sums are float32 inside; in the result they would be memory that grows with G
        lhs, grad, group_sizes, dims, precision(lhs.dtype), preferred_element_type=out_dtype
    )
    return call.result(total)
