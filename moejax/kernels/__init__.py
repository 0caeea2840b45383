"""Grouped matmul and its gradients, on every platform, against one oracle; the same in MXFP8."""

from moejax.kernels.ffn import expert_ffn
from moejax.kernels.grouped import grouped_matmul, grouped_wgrad
from moejax.kernels.kernel import BACKENDS, Backends, Kernel, Tiles
from moejax.kernels.mx_matmul import MXOptions, mx_grouped_matmul, mx_matmul
from moejax.kernels.mx_weight import MXWeight, merge, quantize_weight, split_constants
from moejax.kernels.mxfp8 import MXArray, dequantize, quantize
from moejax.kernels.table import target
from moejax.kernels.varying import vary_like

__all__ = [
    "BACKENDS",
    "Backends",
    "Kernel",
    "MXArray",
    "MXOptions",
    "MXWeight",
    "Tiles",
    "dequantize",
    "expert_ffn",
    "grouped_matmul",
    "grouped_wgrad",
    "merge",
    "mx_grouped_matmul",
    "mx_matmul",
    "quantize",
    "quantize_weight",
    "split_constants",
    "target",
    "vary_like",
]
