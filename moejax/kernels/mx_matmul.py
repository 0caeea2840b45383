"""Matmuls on MXFP8 operands with their gradients: dense, and grouped.

Forward and dgrad multiply quantised rows with quantised weights, each in the orientation whose blocks lie along
its contraction. The emulation is exact: MXFP8 values are exact in bfloat16, their products in float32, so only
the order of summation can differ from a chip that multiplies MXFP8 itself.
"""

import functools
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels import dispatch, table
from moejax.kernels.kernel import Backends, Kernel
from moejax.kernels.mx_weight import MXWeight
from moejax.kernels.mxfp8 import BLOCK, MXArray, ScaleMode, dequantize, quantize
from moejax.varying import vary, varying_axes


@dataclass(frozen=True)
class MXOptions:
    """How the MXFP8 matmul computes.

    Args:
        wgrad: `dequantized` multiplies the dequantised rows with the incoming gradient as it is, in the type of the
            rows. `mxfp8` quantises both along the rows: every group size must be a multiple of 32, or the weight
            gradient is NaN throughout.
    """

    wgrad: Literal["dequantized", "mxfp8"] = "dequantized"


def mx_matmul(x: jax.Array, weight: MXWeight, contract: int = 1) -> jax.Array:
    """Contract the last `contract` dims of `x` with the first of `weight` in MXFP8; see `mx_grouped_matmul`.

    Args:
        x: [..., *K], bfloat16 or float32.
        weight: [*K, *N], quantised with `rows=contract`.
        contract: Number of dims of K.

    Returns:
        [..., *N] of the type of `x`.
    """
    lead, inner = x.shape[: x.ndim - contract], x.shape[x.ndim - contract :]
    if weight.forward.values.ndim != 2 or inner != weight.shape[:contract] or prod(inner) != weight.forward.shape[0]:
        raise ValueError(f"mx_matmul: {contract} dims of {x.shape=} are not the rows of the weight {weight.shape}")
    args = (
        x.reshape(-1, prod(inner)),
        weight.forward,
        weight.backward,
        weight.sink.reshape(weight.forward.shape),
        None,
    )
    out: Any = _mx_matmul(*vary(args, varying_axes(args)), None, MXOptions(), weight.mode)
    return out.reshape(*lead, *weight.shape[contract:])


def mx_grouped_matmul(
    lhs: jax.Array,
    weight: MXWeight,
    group_sizes: jax.Array,
    *,
    backend: str | Kernel | Backends | None = None,
    options: MXOptions | None = None,
) -> jax.Array:
    """`grouped_matmul` in MXFP8.

    Args:
        lhs: Rows [M, K], bfloat16 or float32; they are quantised here, and saved for backward so.
        weight: Of [G, *K, *N].
        group_sizes: Rows of each group in order, int32 [G].
        backend: As in `grouped_matmul`.
        options: How wgrad computes; None for the default.

    Returns:
        [M, N] of the type of `lhs`; rows past the sum are exactly zero, with zero gradient.
    """
    shape = weight.forward.shape
    if lhs.ndim != 2 or len(shape) != 3 or lhs.shape[1] != shape[1] or group_sizes.shape != shape[:1]:
        raise ValueError(f"mx_grouped_matmul: shapes do not fit: {lhs.shape=} weight {shape} {group_sizes.shape=}")
    backends = table.backends(backend, lhs.dtype, lhs.shape[0], shape[0])
    args = (lhs, weight.forward, weight.backward, weight.sink.reshape(shape), group_sizes.astype(jnp.int32))
    return _mx_matmul(*vary(args, varying_axes(args)), backends, options or MXOptions(), weight.mode)


def _product(
    rows: MXArray, weight: MXArray, group_sizes: jax.Array | None, kernel: Kernel | None, transpose: bool, dtype
) -> jax.Array:
    lhs, rhs = dequantize(rows, dtype), dequantize(weight, dtype)
    if group_sizes is None or kernel is None:
        return lax.dot_general(lhs, rhs, (((1,), (1 if transpose else 0,)), ((), ())))
    return dispatch.gmm(lhs, rhs, group_sizes, kernel=kernel, transpose_rhs=transpose)


def _weight_gradient(rows: jax.Array, grad: jax.Array, group_sizes: jax.Array | None, kernel: Kernel | None, dtype):
    if group_sizes is None or kernel is None:
        dims = ((0,), (0,)), ((), ())
        return lax.dot_general(rows, grad, dims, preferred_element_type=jnp.float32).astype(dtype)
    return dispatch.wgrad(rows, grad, group_sizes, kernel=kernel, out_dtype=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _mx_matmul(
    lhs: jax.Array,
    forward: MXArray,
    backward: MXArray,
    sink: jax.Array,
    group_sizes: jax.Array | None,
    backends: Backends | None,
    options: MXOptions,
    mode: ScaleMode,
) -> jax.Array:
    return _forward(lhs, forward, backward, sink, group_sizes, backends, options, mode)[0]


def _forward(lhs, forward, backward, sink, group_sizes, backends, options: MXOptions, mode: ScaleMode):
    with jax.named_scope("mx_matmul"):
        rows = quantize(lhs, mode=mode)
        out = _product(rows, forward, group_sizes, backends and backends.forward, False, lhs.dtype)
    saved = lhs if options.wgrad == "mxfp8" else rows  # blocks along rows cannot be made from blocks along K
    return out, (saved, backward, group_sizes, jnp.zeros((0,), sink.dtype))


def _backward(backends: Backends | None, options: MXOptions, mode: ScaleMode, residuals, grad):
    saved, weight, group_sizes, like = residuals
    kernel = backends and backends.wgrad
    with jax.named_scope("mx_matmul_dgrad"):
        rows = quantize(grad, mode=mode)
        grad_lhs = _product(rows, weight, group_sizes, backends and backends.dgrad, True, grad.dtype)
    with jax.named_scope("mx_matmul_wgrad"):
        if options.wgrad == "dequantized":
            rows = dequantize(saved, grad.dtype)
            return grad_lhs, None, None, _weight_gradient(rows, grad, group_sizes, kernel, like.dtype), None
        rows, grad = (dequantize(quantize(array, axis=0, mode=mode), grad.dtype) for array in (saved, grad))
        grad_weight = _weight_gradient(rows, grad, group_sizes, kernel, like.dtype)
        aligned = jnp.all(group_sizes % BLOCK == 0)
    return grad_lhs, None, None, jnp.where(aligned, grad_weight, jnp.nan), None


_mx_matmul.defvjp(_forward, _backward)
