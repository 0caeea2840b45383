"""Grouped matmul and its gradients, on every platform, against one oracle."""

from moejax.kernels.grouped import grouped_matmul
from moejax.kernels.kernel import BACKENDS, Backends, Kernel, Tiles
from moejax.kernels.table import target
from moejax.kernels.varying import vary_like

__all__ = ["BACKENDS", "Backends", "Kernel", "Tiles", "grouped_matmul", "target", "vary_like"]
