"""Which weights are multiplied in MXFP8, and how gathered weights become so.

Quantised are the matrices of attention, of FFNs, of experts and of latent projections. Routers, embeddings, the
head, norms and biases never are, and neither are modules that `weights.keep` names.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

import jax

from moejax.config import MeshConfig, WeightsConfig
from moejax.errors import UserError
from moejax.kernels import MXWeight, quantize_weight
from moejax.kernels.mxfp8 import BLOCK, ScaleMode
from moejax.sharding import Layout, is_layout

_STACKED = frozenset({"layers", "experts"})
_NEVER = frozenset({"vocab", "router", "norm"})


class Matrix(NamedTuple):
    """A weight [..., *K, *N] that is quantised: numbers of dims of K and of N."""

    rows: int
    cols: int
    mode: ScaleMode


def matrices(layouts: Any, config: WeightsConfig, mesh: MeshConfig) -> Any:
    """For each parameter, the `Matrix` that is quantised, or None.

    Raises:
        UserError: A pattern of `weights.keep` matches nothing; the local part of a matrix is not made of whole blocks.
    """
    paths = jax.tree_util.tree_leaves_with_path(layouts, is_leaf=is_layout)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    leaves = [layout for _, layout in paths]
    found = [_matrix(layout, config) for layout in leaves]
    for pattern in config.keep:
        hits = [i for i, name in enumerate(names) if any(fnmatchcase(module, pattern) for module in _modules(name))]
        if not any(_matrix(leaves[i], config) for i in hits):
            known = ", ".join(name for name, matrix in zip(names, found, strict=True) if matrix)
            raise UserError(f"weights.keep={pattern}: matches no weight that mxfp8 quantises; left are {known}")
        for i in hits:
            found[i] = None
    for name, layout, matrix in zip(names, leaves, found, strict=True):
        if matrix is not None:
            _check(name, layout, matrix, mesh)
    return jax.tree.unflatten(jax.tree.structure(layouts, is_leaf=is_layout), found)


def quantized(weights: Any, forms: Any) -> Any:
    """Gathered compute weights with an `MXWeight` for each `Matrix` of `forms`."""

    def one(form: Matrix | None, weight: jax.Array) -> jax.Array | MXWeight:
        return weight if form is None else quantize_weight(weight, form.rows, form.cols, form.mode)

    with jax.named_scope("quantize"):
        return jax.tree.map(one, forms, weights, is_leaf=lambda form: form is None or isinstance(form, Matrix))


def _modules(name: str) -> Iterator[str]:
    """The parameter and every module that it is in: a.b.c, a.b, a."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _matrix(layout: Layout, config: WeightsConfig) -> Matrix | None:
    dims = [dim for dim in layout.dims if dim not in _STACKED]
    if config.compute != "mxfp8" or len(dims) < 2 or _NEVER & set(dims):
        return None
    rows = 2 if dims[0] == "heads" else 1
    return Matrix(rows, len(dims) - rows, config.scale)


def _check(name: str, layout: Layout, matrix: Matrix, mesh: MeshConfig) -> None:
    count = matrix.rows + matrix.cols
    local = [size // mesh.group(axes) for size, axes in zip(layout.shape, layout.compute, strict=True)]
    sizes = list(zip(layout.dims, local, strict=True))[-count:]
    for part in (sizes[: matrix.rows], sizes[matrix.rows :]):
        # gate and up side by side are two matrices: a block must not lie across both, whatever their sharding
        part = dict(part) | {"gate_up": 1}
        size = prod(part.values())
        if size % BLOCK:
            what = " x ".join(dim for dim in part if dim != "gate_up")
            raise UserError(
                f"weights.compute=mxfp8: {name} has {what}={size} on each device, which is no multiple of {BLOCK}: "
                f"change it, or put {name} under weights.keep"
            )
