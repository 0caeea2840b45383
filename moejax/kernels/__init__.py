"""Grouped matmul and its gradients, on every platform, against one oracle; the same in MXFP8."""

from moejax.kernels.gated import gated_matmul
from moejax.kernels.grouped import grouped_matmul
from moejax.kernels.kernel import BACKENDS, Backends, Kernel, Tiles
from moejax.kernels.mx_grouped import MXOptions, MXWeights, mx_grouped_matmul, quantize_weights
from moejax.kernels.mxfp8 import MXArray, dequantize, quantize
from moejax.kernels.table import target
from moejax.kernels.varying import vary_like

__all__ = [
    "BACKENDS",
    "Backends",
    "Kernel",
    "MXArray",
    "MXOptions",
    "MXWeights",
    "Tiles",
    "dequantize",
    "gated_matmul",
    "grouped_matmul",
    "mx_grouped_matmul",
    "quantize",
    "quantize_weights",
    "target",
    "vary_like",
]
