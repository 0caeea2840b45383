"""Mesh, sharding rules, and what follows from them.

A parameter has two layouts. *Storage*: float32 main weights and optimizer state, sharded as finely
as the rules allow. *Compute*: the weights that forward and backward read. One table of rules (logical
dim to mesh axes) gives both. Comparing the two gives the collectives: a leaf is gathered over the axes
that only storage has; its gradient is summed over all token axes that compute does not shard, and that
sum is scattered where storage is sharded. Pipeline stages are a third matter: storage knows nothing of
them, and layers go to their stage by an all_to_all before they are gathered.
"""

from moejax.sharding.collectives import gather, gather_for, place_layers, reduce, sum_of_squares
from moejax.sharding.layout import (
    FLOAT32_DIMS,
    Layout,
    compute_axes,
    is_layout,
    make_layouts,
    make_mesh,
    storage_shardings,
)

__all__ = [
    "FLOAT32_DIMS",
    "Layout",
    "compute_axes",
    "gather",
    "gather_for",
    "is_layout",
    "make_layouts",
    "make_mesh",
    "place_layers",
    "reduce",
    "storage_shardings",
    "sum_of_squares",
]
