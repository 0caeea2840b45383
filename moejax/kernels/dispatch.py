"""One entry for each direction: runs the kernel that it is told."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moejax.kernels import cpu, padded, reference, xla
from moejax.kernels.kernel import Kernel
from moejax.kernels.operands import Product, WeightGradient
from moejax.varying import vary


def _backend(name: str) -> Any:
    """Module of a backend."""
    match name:
        case "gpu":
            from moejax.kernels import gpu as module  # Pallas takes a second to import: only where it is used
        case "mosaic":
            from moejax.kernels import mosaic as module
        case "tpu":
            from moejax.kernels import tpu as module
        case _:
            module = {"reference": reference, "cpu": cpu, "xla": xla, "padded": padded}[name]
    return module


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
    call = Product(lhs, rhs, group_sizes, transpose_rhs, jnp.dtype(out_dtype or lhs.dtype))
    m, _, n, _ = call.sizes
    if 0 in call.sizes:
        return vary(jnp.zeros((m, n), call.out_dtype), call.axes)
    return _backend(kernel.backend).gmm(call, kernel)


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

    Raises ValueError and TypeError for shapes and types that do not fit.
    """
    out_dtype = jnp.dtype(jnp.float32 if accumulator is not None else out_dtype or lhs.dtype)
    call = WeightGradient(lhs, grad, group_sizes, out_dtype, accumulator)
    m, k, n, groups = call.sizes
    if grad.shape[0] != m or (accumulator is not None and accumulator.shape != (groups, k, n)):
        total = "none" if accumulator is None else accumulator.shape
        raise ValueError(f"wgrad: shapes do not fit: {lhs.shape=} {grad.shape=} {groups=}, accumulator {total}")
    if accumulator is not None and accumulator.dtype != jnp.float32:
        raise TypeError(f"wgrad: the accumulator must be float32, not {accumulator.dtype}")
    if accumulator is not None:
        accumulator = vary(accumulator, call.axes)
    if 0 in call.sizes:
        return vary(jnp.zeros((groups, k, n), out_dtype), call.axes) if accumulator is None else accumulator
    return _backend(kernel.backend).wgrad(call._replace(accumulator=accumulator), kernel)
