"""One entry for each direction: runs the kernel that it is told."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moejax.kernels import cpu, padded, reference, xla
from moejax.kernels.kernel import Kernel
from moejax.varying import vary, varying_axes


def _backend(kernel: Kernel) -> tuple[Any, dict[str, Kernel]]:
    """Module of a backend, and what its functions are told besides their operands."""
    match kernel.backend:
        case "reference":
            return reference, {}
        case "xla":
            return xla, {}
        case "gpu":
            from moejax.kernels import gpu as module  # Pallas takes a second to import: only where it is used
        case "mosaic":
            from moejax.kernels import mosaic as module
        case "tpu":
            from moejax.kernels import tpu as module
        case "padded":
            module = padded
        case _:
            module = cpu
    return module, {"kernel": kernel}


def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    kernel: Kernel,
    transpose_rhs: bool = False,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Rows of lhs [M, K] times their group's matrix of rhs [G, K, N], or [G, N, K] with `transpose_rhs`. No gradient.

    Forward is this; dgrad is this with the incoming gradient and `transpose_rhs` flipped.
    """
    out_dtype = jnp.dtype(out_dtype or lhs.dtype)
    if lhs.shape[0] == 0:
        shape = (0, rhs.shape[1 if transpose_rhs else 2])
        return vary(jnp.zeros(shape, out_dtype), varying_axes(lhs, rhs, group_sizes))
    module, options = _backend(kernel)
    return module.gmm(lhs, rhs, group_sizes, transpose_rhs=transpose_rhs, out_dtype=out_dtype, **options)


def wgrad(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    *,
    kernel: Kernel,
    out_dtype: DTypeLike | None = None,
    accumulator: jax.Array | None = None,
) -> jax.Array:
    """Sum of lhs[row]^T grad[row] over each group's rows, lhs [M, K], grad [M, N] -> [G, K, N], without gradient.

    Sums are float32 and rounded once to `out_dtype` (that of `lhs` if None). With a float32 `accumulator`
    [G, K, N] they are added to it, in place where the caller donates it, and the result is float32.
    """
    if accumulator is not None and accumulator.dtype != jnp.float32:
        raise TypeError(f"wgrad: the accumulator must be float32, not {accumulator.dtype}")
    out_dtype = jnp.dtype(jnp.float32 if accumulator is not None else out_dtype or lhs.dtype)
    axes = varying_axes(lhs, grad, group_sizes)
    accumulator = None if accumulator is None else vary(accumulator, axes)
    if lhs.shape[0] == 0:
        shape = (group_sizes.shape[0], lhs.shape[1], grad.shape[1])
        return accumulator if accumulator is not None else vary(jnp.zeros(shape, out_dtype), axes)
    module, options = _backend(kernel)
    return module.wgrad(lhs, grad, group_sizes, out_dtype=out_dtype, accumulator=accumulator, **options)
