"""Kernels and the varying axes of a checked `jax.shard_map`: operands must agree, and outputs must say theirs."""

from collections.abc import Set

import jax
from jax.sharding import ManualAxisType
from jax.typing import DTypeLike

from moejax.varying import vary, varying_axes


def vary_like(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """All `arrays`, each made to vary over the union of their axes."""
    axes = varying_axes(arrays)
    return tuple(vary(array, axes) for array in arrays)


def output_type(shape: tuple[int, ...], dtype: DTypeLike, axes: Set[str]) -> jax.ShapeDtypeStruct:
    """Type of a Pallas kernel's output that varies over `axes`; a checked region demands it even where empty."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=ManualAxisType(varying=frozenset(axes)))
