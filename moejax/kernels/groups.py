"""Where the groups of a grouped matmul lie: bounds and tables of row tiles, computed on the device.

M rows, G groups. Group g owns rows [start[g], end[g]); rows past end[G - 1] are the tail.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Bounds(NamedTuple):
    """First row and one past the last row of each group, int32 [G]."""

    start: jax.Array
    end: jax.Array


def bounds(group_sizes: jax.Array) -> Bounds:
    """Bounds of contiguous groups with these sizes (int32 [G])."""
    end = jnp.cumsum(group_sizes, dtype=jnp.int32)
    return Bounds(end - group_sizes, end)


def live_rows(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """True for rows that belong to a group, bool [M]."""
    return jnp.arange(num_rows, dtype=jnp.int32) < jnp.sum(group_sizes, dtype=jnp.int32)


def row_groups(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Group of every row, int32 [M]; G for rows of the tail."""
    return count_ends(jnp.arange(num_rows, dtype=jnp.int32), bounds(group_sizes).end)


def count_ends(index: jax.Array, end: jax.Array) -> jax.Array:
    """Number of `end` at or below each index: a vectorised search in a sorted table, without a loop."""
    return jnp.sum(index[:, None] >= end[None, :], axis=1, dtype=jnp.int32)


class Tiles(NamedTuple):
    """Row tiles; each belongs to one group and starts a whole number of tiles after the group's first row.

    group: int32 [T], group of the tile; past `count`, the last group.
    row: int32 [T], first row.
    end: int32 [T], one past the last row, at most row + tile size; `row` where the tile is unused.
    count: int32 scalar, tiles in use.
    """

    group: jax.Array
    row: jax.Array
    end: jax.Array
    count: jax.Array


def max_tiles(num_rows: int, num_groups: int, tile_rows: int) -> int:
    """Most tiles that any group sizes can need: every group may end in a broken tile."""
    return -(-num_rows // tile_rows) + num_groups


def row_tiles(group_sizes: jax.Array, num_tiles: int, tile_rows: int) -> Tiles:
    """Cut every group into tiles of `tile_rows` rows, the last one of a group possibly shorter."""
    start, end = bounds(group_sizes)
    tiles_end = jnp.cumsum((group_sizes + tile_rows - 1) // tile_rows, dtype=jnp.int32)
    tiles_start = jnp.concatenate([jnp.zeros_like(tiles_end[:1]), tiles_end[:-1]])
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    group = jnp.minimum(count_ends(tile, tiles_end), group_sizes.shape[0] - 1)
    row = start[group] + (tile - tiles_start[group]) * tile_rows
    stop = jnp.where(tile < tiles_end[-1], jnp.minimum(row + tile_rows, end[group]), row)
    return Tiles(group, row, stop, tiles_end[-1])


class Visits(NamedTuple):
    """Visits by groups of row blocks that are aligned to the buffer, in row order; all int32 [T].

    group: G for the tail. block: row block. lo, hi: rows that this visit owns; empty where hi <= lo.
    """

    group: jax.Array
    block: jax.Array
    lo: jax.Array
    hi: jax.Array


def visits(group_sizes: jax.Array, num_rows: int, rows: int, *, tail: bool, reverse: bool) -> Visits:
    """Visits of blocks of `rows` rows. With `tail` every row is owned; without, every group has a visit."""
    sizes, num_groups = group_sizes, group_sizes.shape[0]
    if tail:
        sizes = jnp.concatenate([sizes, (num_rows - jnp.sum(sizes, dtype=jnp.int32))[None]])
    start, end = bounds(sizes)
    per_group = jnp.where(sizes > 0, (end + rows - 1) // rows - start // rows, 0 if tail else 1)
    stop = jnp.cumsum(per_group, dtype=jnp.int32)
    index = jnp.arange(max_tiles(num_rows, num_groups, rows), dtype=jnp.int32)
    visit = jnp.minimum(index, stop[-1] - 1)  # unused visits repeat the last one's blocks, so nothing is fetched
    group = count_ends(visit, stop)
    block = start[group] // rows + visit - (stop - per_group)[group]
    block = jnp.clip(block, 0, -(-num_rows // rows) - 1)
    lo, hi = jnp.maximum(start[group], block * rows), jnp.minimum(end[group], (block + 1) * rows)
    found = Visits(group, block, lo, jnp.where(index < stop[-1], hi, lo))
    return Visits(*(jnp.flip(a) for a in found)) if reverse else found
