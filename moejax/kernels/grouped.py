"""The public grouped matmul: argument checks, choice of backend per direction, and the gradient rule."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moejax.kernels import dispatch, table
from moejax.kernels.kernel import Backends, Kernel
from moejax.kernels.operands import OPERAND_TYPES
from moejax.varying import vary, varying_axes


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    backend: str | Kernel | Backends | None = None,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    max_group_size: int | None = None,
) -> jax.Array:
    """Multiply contiguous groups of rows, each by its own matrix.

    Rows past sum(group_sizes) are exactly zero in the result and get exactly zero gradient, whatever
    they hold. The weight gradient has the type of `rhs` and is summed in float32; that of an empty
    group is exactly zero. An incoming gradient is rounded to the type of `lhs` before it is used.

    Args:
        lhs: Rows, [M, K], float32, bfloat16 or float16.
        rhs: One matrix per group, [G, K, N] ([G, N, K] with `transpose_rhs`), of the type of `lhs`.
        group_sizes: Rows of each group in order, int32 [G]; their sum must be at most M.
        backend: One kernel for all directions, by name or as a `Kernel`, or `Backends`; None for the table's choice.
        transpose_rhs: Multiply by the transposed matrices, which are not materialised.
        preferred_element_type: Type of the result; that of `lhs` if None.
        max_group_size: A bound on the rows of every group, if the caller knows one: lets the table choose
            `padded`. Ignored by a `backend` that is given.

    Returns:
        [M, N].

    Raises:
        ValueError: Shapes that do not fit. TypeError: Types that do not fit.
        UserError: A backend that does not exist, or not on this machine.
    """
    contract = 2 if transpose_rhs else 1
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[contract] or group_sizes.shape != rhs.shape[:1]:
        raise ValueError(f"grouped_matmul: shapes do not fit: {lhs.shape=} {rhs.shape=} {group_sizes.shape=}")
    out_dtype = jnp.dtype(preferred_element_type or lhs.dtype)
    floating = {lhs.dtype.name, out_dtype.name} <= OPERAND_TYPES
    if lhs.dtype != rhs.dtype or not floating or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        types = f"{lhs.dtype=} {rhs.dtype=} {group_sizes.dtype=} preferred_element_type={out_dtype.name}"
        raise TypeError(f"grouped_matmul: types do not fit: {types}")
    backends = table.backends(backend, lhs.dtype, lhs.shape[0], rhs.shape[0], max_group_size)
    axes = varying_axes(lhs, rhs, group_sizes)  # outside the gradient rule: the transpose of this cast sums gradients
    lhs, rhs, group_sizes = (vary(a, axes) for a in (lhs, rhs, group_sizes.astype(jnp.int32)))
    return _grouped_matmul(lhs, rhs, group_sizes, backends, transpose_rhs, out_dtype)


def grouped_wgrad(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    *,
    backend: str | Kernel | Backends | None = None,
    accumulator: jax.Array | None = None,
) -> jax.Array:
    """Weight gradient alone, for callers that sum it over microbatches: each group's lhs^T grad, without a gradient.

    Args:
        lhs: Rows, [M, K].
        grad: Gradient of the result, [M, N], of the type of `lhs`.
        group_sizes: As in `grouped_matmul`.
        backend: As in `grouped_matmul`; its kernel for `wgrad` is used.
        accumulator: float32 [G, K, N] to which the sums are added; in place if the caller's jit donates it.

    Returns:
        [G, K, N]; float32 with an accumulator, else of the type of `lhs`. Sums are float32.

    Raises:
        ValueError: Shapes that do not fit. TypeError: Types that do not fit. UserError: As in `grouped_matmul`.
    """
    if lhs.ndim != 2 or grad.ndim != 2 or group_sizes.ndim != 1:
        raise ValueError(f"grouped_wgrad: shapes do not fit: {lhs.shape=} {grad.shape=} {group_sizes.shape=}")
    known = lhs.dtype == grad.dtype and lhs.dtype.name in OPERAND_TYPES
    if not known or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"grouped_wgrad: types do not fit: {lhs.dtype=} {grad.dtype=} {group_sizes.dtype=}")
    kernel = table.backends(backend, lhs.dtype, lhs.shape[0], group_sizes.shape[0]).wgrad
    axes = varying_axes(lhs, grad, group_sizes)
    lhs, grad, group_sizes = (vary(a, axes) for a in (lhs, grad, group_sizes.astype(jnp.int32)))
    return dispatch.wgrad(lhs, grad, group_sizes, kernel=kernel, accumulator=accumulator)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _grouped_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, backends: Backends, transpose_rhs: bool, dtype: jnp.dtype
) -> jax.Array:
    with jax.named_scope("grouped_matmul"):
        return dispatch.gmm(
            lhs, rhs, group_sizes, kernel=backends.forward, transpose_rhs=transpose_rhs, out_dtype=dtype
        )


def _forward(lhs, rhs, group_sizes, backends, transpose_rhs, dtype):
    out = _grouped_matmul(lhs, rhs, group_sizes, backends, transpose_rhs, dtype)
    return out, (lhs, rhs, group_sizes)


def _backward(backends, transpose_rhs, dtype, residuals, grad):
    del dtype
    lhs, rhs, group_sizes = residuals
    grad = grad.astype(lhs.dtype)
    with jax.named_scope("grouped_matmul_dgrad"):
        grad_lhs = dispatch.gmm(grad, rhs, group_sizes, kernel=backends.dgrad, transpose_rhs=not transpose_rhs)
    with jax.named_scope("grouped_matmul_wgrad"):
        pair = (grad, lhs) if transpose_rhs else (lhs, grad)
        grad_rhs = dispatch.wgrad(*pair, group_sizes, kernel=backends.wgrad, out_dtype=rhs.dtype)
    return grad_lhs, grad_rhs, None


_grouped_matmul.defvjp(_forward, _backward)
