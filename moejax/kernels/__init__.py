"""Grouped matmul and its gradients, on every platform, against one oracle."""

from moejax.kernels.grouped import Backends, grouped_matmul
from moejax.kernels.varying import vary, vary_like, varying

__all__ = ["Backends", "grouped_matmul", "vary", "vary_like", "varying"]
