"""Which mesh axes a value varies over inside a checked `jax.shard_map`, on every supported JAX.

Outside a manual region all of these are empty sets and the casts are the identity.
"""

from collections.abc import Set

import jax
from jax import lax
from jax.typing import DTypeLike


def varying(*arrays: jax.Array) -> frozenset[str]:
    """Union of the manual mesh axes over which `arrays` vary."""
    axes: frozenset[str] = frozenset()
    for array in arrays:
        aval = jax.typeof(array)
        manual = getattr(aval, "manual_axis_type", None)  # jax 0.11 on; before that the type had `vma`
        axes |= manual.varying if manual is not None else getattr(aval, "vma", frozenset())
    return axes


def vary(array: jax.Array, axes: Set[str]) -> jax.Array:
    """`array`, made to vary over `axes` too. The transpose of this cast sums gradients over the added axes."""
    missing = tuple(sorted(axes - varying(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def vary_like(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """All `arrays`, each made to vary over the union of their axes."""
    axes = varying(*arrays)
    return tuple(vary(array, axes) for array in arrays)


def output_type(shape: tuple[int, ...], dtype: DTypeLike, axes: Set[str]) -> jax.ShapeDtypeStruct:
    """Type of a kernel's output that varies over `axes`."""
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    from jax.sharding import ManualAxisType

    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=ManualAxisType(varying=frozenset(axes)))
