"""Kernels and the varying axes of a checked `jax.shard_map`: operands must agree, and outputs must say theirs."""

from collections.abc import Set

import jax
from jax.typing import DTypeLike

from moejax.varying import vary, varying_axes


def vary_like(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """All `arrays`, each made to vary over the union of their axes."""
    axes = varying_axes(arrays)
    return tuple(vary(array, axes) for array in arrays)


def output_type(shape: tuple[int, ...], dtype: DTypeLike, axes: Set[str]) -> jax.ShapeDtypeStruct:
    """Type of a Pallas kernel's output that varies over `axes`."""
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    from jax.sharding import ManualAxisType  # in every version since 0.10.2, which needs it for nothing else here

    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=ManualAxisType(varying=frozenset(axes)))
