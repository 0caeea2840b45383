"""Grouped matmul on MXFP8 operands, with its gradients.

Forward and dgrad multiply quantised rows with quantised weights, each in the orientation whose blocks lie along
its contraction. The emulation is exact: MXFP8 values are exact in bfloat16, their products in float32, so only
the order of summation can differ from a chip that multiplies MXFP8 itself.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from moejax.kernels import dispatch, table
from moejax.kernels.kernel import Backends, Kernel
from moejax.kernels.mxfp8 import BLOCK, MXArray, ScaleMode, dequantize, quantize
from moejax.varying import vary, varying_axes


@functools.partial(jax.tree_util.register_dataclass, data_fields=("forward", "dgrad"), meta_fields=())
@dataclass(frozen=True)
class MXWeights:
    """Weights [..., G, K, N] in the two orientations that training reads. Derived: rebuild both together.

    Attributes:
        forward: Blocks along K.
        dgrad: Blocks along N.
    """

    forward: MXArray
    dgrad: MXArray


def quantize_weights(weights: jax.Array, mode: ScaleMode = "round_ceiling") -> MXWeights:
    """Both orientations of weights [..., K, N], 2 * 33 / 32 bytes a value; K and N must be multiples of 32."""
    return MXWeights(quantize(weights, axis=-2, mode=mode), quantize(weights, axis=-1, mode=mode))


@dataclass(frozen=True)
class MXOptions:
    """How the MXFP8 matmul computes.

    Args:
        mode: Scale mode of activations and their gradients.
        wgrad: `bfloat16` multiplies dequantised rows with the incoming gradient as it is. `mxfp8` quantises both
            along the rows: every group size must be a multiple of 32, or the weight gradient is NaN throughout.
    """

    mode: ScaleMode = "round_ceiling"
    wgrad: Literal["bfloat16", "mxfp8"] = "bfloat16"


def mx_grouped_matmul(
    lhs: jax.Array,
    weights: MXWeights,
    sink: jax.Array,
    group_sizes: jax.Array,
    *,
    backend: str | Kernel | Backends | None = None,
    options: MXOptions | None = None,
) -> jax.Array:
    """`grouped_matmul` in MXFP8.

    Weights that are quantised have no gradient of their own; it is that of `sink`, straight through. Pass the
    weights that were quantised, or, where those are not kept, zeros of the type that gradients should have:
    `sink` is never read, so a compiled program does not hold it.

    Args:
        lhs: Rows [M, K], bfloat16 or float32; they are quantised here, and saved for backward so.
        weights: Quantised weights of [G, K, N].
        sink: [G, K, N], gives the gradient its place and type.
        group_sizes: Rows of each group in order, int32 [G].
        backend: As in `grouped_matmul`.
        options: Scale mode and wgrad; None for the defaults.

    Returns:
        [M, N] of the type of `lhs`; rows past the sum are exactly zero, with zero gradient.
    """
    shape = weights.forward.shape
    if lhs.ndim != 2 or len(shape) != 3 or lhs.shape[1] != shape[1] or sink.shape != shape:
        raise ValueError(f"mx_grouped_matmul: shapes do not fit: {lhs.shape=} weights {shape} {sink.shape=}")
    if weights.forward.axis != -2 or weights.dgrad.axis != -1:
        raise ValueError("mx_grouped_matmul: blocks of weights must lie along K (forward) and N (dgrad)")
    if backend is None:
        backend = table.choose_all(jnp.bfloat16, lhs.shape[0], shape[0], None)
    elif not isinstance(backend, Backends):
        backend = Backends.all(backend)
    axes = varying_axes(lhs, weights, sink, group_sizes)
    args = vary((lhs, weights, sink, group_sizes.astype(jnp.int32)), axes)
    return _mx_grouped_matmul(*args, backend, options or MXOptions())


def _gmm(rows: MXArray, weights: MXArray, group_sizes: jax.Array, kernel: Kernel, transpose: bool, dtype) -> jax.Array:
    operands = dequantize(rows), dequantize(weights)
    return dispatch.gmm(*operands, group_sizes, kernel=kernel, transpose_rhs=transpose, out_dtype=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _mx_grouped_matmul(lhs, weights, sink, group_sizes, backends, options):
    return _forward(lhs, weights, sink, group_sizes, backends, options)[0]


def _forward(lhs, weights, sink, group_sizes, backends, options):
    rows = quantize(lhs, mode=options.mode)
    out = _gmm(rows, weights.forward, group_sizes, backends.forward, False, lhs.dtype)
    saved = lhs if options.wgrad == "mxfp8" else rows  # blocks along rows cannot be made from blocks along K
    prototype = jnp.zeros((0,), lhs.dtype), jnp.zeros((0,), sink.dtype)
    return out, (saved, weights.dgrad, group_sizes, prototype)


def _backward(backends, options, residuals, grad):
    saved, weights, group_sizes, (lhs_like, sink_like) = residuals
    grad_lhs = _gmm(quantize(grad, mode=options.mode), weights, group_sizes, backends.dgrad, True, lhs_like.dtype)
    wgrad = functools.partial(dispatch.wgrad, kernel=backends.wgrad, out_dtype=sink_like.dtype)
    if options.wgrad == "bfloat16":
        return grad_lhs, None, wgrad(dequantize(saved), grad.astype(jnp.bfloat16), group_sizes), None
    rows, grad = (dequantize(quantize(array, axis=0, mode=options.mode)) for array in (saved, grad))
    grad_weights = wgrad(rows, grad, group_sizes)
    aligned = jnp.all(group_sizes % BLOCK == 0)
    return grad_lhs, None, jnp.where(aligned, grad_weights, jnp.nan), None


_mx_grouped_matmul.defvjp(_forward, _backward)
