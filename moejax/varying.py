"""Varying axes of values inside `jax.shard_map`, on every supported JAX version.

Inside a checked `shard_map` each value has a type: the mesh axes over which it may differ between
devices. Autodiff sums a cotangent over every axis that its primal does not vary on, so weights are
made varying where their gradients are to stay local.
"""

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax


def varying_axes(*values: Any) -> frozenset[str]:
    """Mesh axes over which any leaf of `values` varies; empty outside `shard_map`."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(values):
        kind = jax.typeof(leaf)
        manual = getattr(kind, "manual_axis_type", None)  # jax >= 0.11
        axes |= frozenset(manual.varying if manual is not None else getattr(kind, "vma", ()))
    return axes


def vary(tree: Any, axes: Iterable[str]) -> Any:
    """Mark every leaf of `tree` as varying over `axes`. The transpose sums over the added axes."""
    wanted = frozenset(axes)

    def one(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(wanted - varying_axes(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(one, tree)
