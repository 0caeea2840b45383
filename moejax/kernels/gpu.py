"""Grouped matmul for NVIDIA GPUs of sm_80 and up: Pallas with the Triton lowering.

Row tiles start at their group's first row, so groups need no padding. Rows past the last group form one
more group, whose tiles store zeros without reading. dgrad reads the weight transposed in the load.

Python ints become int1 in `jnp.where` of the Triton lowering: integer constants here carry their type.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pt

from moejax.kernels.groups import bounds, max_tiles, row_tiles
from moejax.kernels.kernel import Kernel, Tiles
from moejax.kernels.operands import Product, WeightGradient, precision
from moejax.kernels.varying import output_type, vary_like
from moejax.varying import varying_axes

WHOLE = pl.BlockSpec(memory_space=pl.ANY)
"""An operand that the kernel reads by its own index arithmetic."""

_SWIZZLE = 8  # row tiles that neighbouring programs share a column tile of, so that operands stay in the L2 cache


def tile_table(group_sizes: jax.Array, num_rows: int, tile_rows: int) -> jax.Array:
    """Tiles of all rows, int32 [T, 3]: group (G for the tail), first row, one past the last row.

    The tail is one more group; it needs no more tiles than a broken tile of a group, so T does not grow by more.
    """
    rest = num_rows - jnp.sum(group_sizes, dtype=jnp.int32)
    sizes = jnp.concatenate([group_sizes, rest[None]])
    tiles = row_tiles(sizes, max_tiles(num_rows, group_sizes.shape[0], tile_rows), tile_rows)
    return jnp.stack([tiles.group, tiles.row, tiles.end], axis=1)


def swizzle(program: jax.Array, num_rows: int, num_cols: int) -> tuple[jax.Array, jax.Array]:
    """Row and column tile of a program: blocks of `_SWIZZLE` row tiles, column after column."""
    block_size = _SWIZZLE * num_cols
    first = program // block_size * _SWIZZLE
    height = jnp.minimum(num_rows - first, jnp.int32(_SWIZZLE))
    within = program % block_size
    return first + within % height, within // height


def edge(start: jax.Array, size: int, limit: int) -> jax.Array | None:
    """Which of `size` indices from `start` lie below `limit`; None if all always do."""
    return None if limit % size == 0 else start + jnp.arange(size, dtype=jnp.int32) < limit


def outer(rows: jax.Array | None, cols: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
    """Mask of a block from masks of its rows and columns; None if both are."""
    if rows is None and cols is None:
        return None
    mask = jnp.ones(shape, bool)
    mask = mask if rows is None else mask & rows[:, None]
    return mask if cols is None else mask & cols[None, :]


def load(ref, index: tuple, mask: jax.Array | None) -> jax.Array:
    """Block of `ref`, zero where the mask is false."""
    return pt.load(ref.at[index], mask=mask, other=None if mask is None else 0.0)


def load_weight(ref, group, col, depth, tiles: Tiles, n: int, k: int, transpose: bool) -> jax.Array:
    """Block [depth, cols] of a weight [G, K, N], or [cols, depth] of [G, N, K]."""
    cols, depths = edge(col, tiles.cols, n), edge(depth, tiles.depth, k)
    at_col, at_depth = pl.ds(col, tiles.cols), pl.ds(depth, tiles.depth)
    if transpose:
        return load(ref, (group, at_col, at_depth), outer(cols, depths, (tiles.cols, tiles.depth)))
    return load(ref, (group, at_depth, at_col), outer(depths, cols, (tiles.depth, tiles.cols)))


def program_id(num_programs: int, reverse: bool) -> jax.Array:
    """This program, counted from the end in `reverse`."""
    program = pl.program_id(0)
    return jnp.int32(num_programs - 1) - program if reverse else program


class Place(NamedTuple):
    """Where a program works: the entries of `tile_table`, and its tile of columns and their first."""

    group: jax.Array
    row: jax.Array
    end: jax.Array
    col_tile: jax.Array
    col: jax.Array


def place(table_ref, n: int, tiles: Tiles, reverse: bool) -> Place:
    """Place of this program of a kernel whose result has `n` columns."""
    num_tiles, num_cols = table_ref.shape[0], pl.cdiv(n, tiles.cols)
    tile, col_tile = swizzle(program_id(num_tiles * num_cols, reverse), num_tiles, num_cols)
    group, row, end = (table_ref[tile, i] for i in range(3))
    return Place(group, row, end, col_tile, col_tile * tiles.cols)


def params(tiles: Tiles) -> pt.CompilerParams:
    """Compiler parameters of a kernel with these tiles."""
    return pt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages)


def contract(
    x_ref, w_ref, group, groups: int, row, mine: jax.Array, col, tiles: Tiles, n: int, k: int, *, transpose: bool
) -> jax.Array:
    """Block [rows, cols] of rows of x [M, K] times the group's weight, float32; zero for the tail, unread."""
    dims = (((1,), (1 if transpose else 0,)), ((), ()))

    def step(i, total):
        depth = i * tiles.depth
        x_mask = outer(mine, edge(depth, tiles.depth, k), (tiles.rows, tiles.depth))
        x = load(x_ref, (pl.ds(row, tiles.rows), pl.ds(depth, tiles.depth)), x_mask)
        w = load_weight(w_ref, jnp.minimum(group, groups - 1), col, depth, tiles, n, k, transpose)
        return total + lax.dot_general(x, w, dims, precision(x.dtype), jnp.float32)

    steps = jnp.where(group < groups, jnp.int32(pl.cdiv(k, tiles.depth)), jnp.int32(0))
    return lax.fori_loop(jnp.int32(0), steps, step, jnp.zeros((tiles.rows, tiles.cols), jnp.float32))


def _gmm_kernel(table_ref, x_ref, w_ref, out_ref, *, tiles: Tiles, shape: tuple, transpose: bool, reverse: bool):
    groups, n, k = shape
    group, row, end, _col_tile, col = place(table_ref, n, tiles, reverse)

    @pl.when(end > row)
    def _():
        mine = row + jnp.arange(tiles.rows, dtype=jnp.int32) < end
        total = contract(x_ref, w_ref, group, groups, row, mine, col, tiles, n, k, transpose=transpose)
        mask = outer(mine, edge(col, tiles.cols, n), (tiles.rows, tiles.cols))
        at = out_ref.at[pl.ds(row, tiles.rows), pl.ds(col, tiles.cols)]
        pt.store(at, total.astype(out_ref.dtype), mask=mask)


def gmm(call: Product, kernel: Kernel) -> jax.Array:
    """The product, [M, N]."""
    lhs, rhs, group_sizes, transpose_rhs, out_dtype = call
    tiles = kernel.tiles or Tiles()
    m, k, n, groups = call.sizes
    table = tile_table(group_sizes, m, tiles.rows)
    args = vary_like(table, lhs, rhs)
    body = functools.partial(
        _gmm_kernel,
        tiles=tiles,
        shape=(groups, n, k),
        transpose=transpose_rhs,
        reverse=kernel.reverse,
    )
    return pl.pallas_call(
        body,
        grid=(table.shape[0] * pl.cdiv(n, tiles.cols),),
        in_specs=[WHOLE] * 3,
        out_specs=WHOLE,
        out_shape=output_type((m, n), out_dtype, varying_axes(*args)),
        interpret=kernel.interpret,
        compiler_params=params(tiles),
        name="moejax_gmm_transposed" if transpose_rhs else "moejax_gmm",
    )(*args)


def _wgrad_kernel(bounds_ref, x_ref, dy_ref, *refs, tiles: Tiles, shape: tuple, reverse: bool):
    groups, k, n = shape
    out_ref = refs[-1]
    num_depths, num_cols = pl.cdiv(k, tiles.depth), pl.cdiv(n, tiles.cols)
    program = program_id(groups * num_depths * num_cols, reverse)
    group = program // (num_depths * num_cols)
    depth_tile, col_tile = swizzle(program % (num_depths * num_cols), num_depths, num_cols)
    start, end = bounds_ref[group, 0], bounds_ref[group, 1]
    depth, col = depth_tile * tiles.depth, col_tile * tiles.cols
    depths, cols = edge(depth, tiles.depth, k), edge(col, tiles.cols, n)
    at_depth, at_col = pl.ds(depth, tiles.depth), pl.ds(col, tiles.cols)

    def step(i, total):
        row = start + i * tiles.rows
        mine, at_row = row + jnp.arange(tiles.rows, dtype=jnp.int32) < end, pl.ds(row, tiles.rows)
        x = load(x_ref, (at_row, at_depth), outer(mine, depths, (tiles.rows, tiles.depth)))
        dy = load(dy_ref, (at_row, at_col), outer(mine, cols, (tiles.rows, tiles.cols)))
        return total + lax.dot_general(x, dy, (((0,), (0,)), ((), ())), precision(x.dtype), jnp.float32)

    steps = (end - start + tiles.rows - 1) // tiles.rows
    total = lax.fori_loop(jnp.int32(0), steps, step, jnp.zeros((tiles.depth, tiles.cols), jnp.float32))
    mask = outer(depths, cols, (tiles.depth, tiles.cols))
    if len(refs) == 2:
        total = total + load(refs[0], (group, at_depth, at_col), mask)
    pt.store(out_ref.at[group, at_depth, at_col], total.astype(out_ref.dtype), mask=mask)


def wgrad(call: WeightGradient, kernel: Kernel) -> jax.Array:
    """The weight gradient, [G, K, N]."""
    lhs, grad, group_sizes, out_dtype, accumulator = call
    tiles = kernel.tiles or Tiles(rows=64, cols=128, depth=128)
    _, k, n, groups = call.sizes
    extra = () if accumulator is None else (accumulator,)
    args = vary_like(jnp.stack(bounds(group_sizes), axis=1), lhs, grad, *extra)
    return pl.pallas_call(
        functools.partial(_wgrad_kernel, tiles=tiles, shape=(groups, k, n), reverse=kernel.reverse),
        grid=(groups * pl.cdiv(k, tiles.depth) * pl.cdiv(n, tiles.cols),),
        in_specs=[WHOLE] * len(args),
        out_specs=WHOLE,
        out_shape=output_type((groups, k, n), out_dtype, varying_axes(*args)),
        input_output_aliases={} if accumulator is None else {3: 0},
        interpret=kernel.interpret,
        compiler_params=params(tiles),
        name="moejax_gmm_wgrad",
    )(*args)
