"""Gate and up projections of SwiGLU experts in one pass over the rows, on NVIDIA GPUs (Triton lowering).

The prologue gathers token rows by index, so that the K-fold copy of the activations is never written; the
epilogue applies the activation and the routing weight to accumulators that are still in registers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pt

from moejax.kernels.gpu import WHOLE, edge, load, outer, params, precision, program_id, swizzle, tile_table
from moejax.kernels.kernel import Kernel, Tiles
from moejax.kernels.varying import output_type, vary_like
from moejax.varying import varying_axes

_TILES = Tiles(rows=128, cols=128, depth=64, warps=8, stages=3)  # two accumulators; four warps spill registers


def _kernel(table_ref, x_ref, w_ref, *refs, tiles: Tiles, shape: tuple, gather: bool, scaled: bool, reverse: bool):
    refs = list(refs)
    index_ref = refs.pop(0) if gather else None
    scale_ref = refs.pop(0) if scaled else None
    hidden_ref, pre_ref = refs
    num_tiles, groups, f, k = shape
    num_cols = pl.cdiv(f, tiles.cols)
    tile, col_tile = swizzle(program_id(num_tiles * num_cols, reverse), num_tiles, num_cols)
    group, row, end = table_ref[tile, 0], table_ref[tile, 1], table_ref[tile, 2]
    col = col_tile * tiles.cols

    @pl.when(end > row)
    def _():
        rows = row + jnp.arange(tiles.rows, dtype=jnp.int32)
        mine, cols = rows < end, edge(col, tiles.cols, f)
        source = rows if index_ref is None else pt.load(index_ref.at[rows], mask=mine, other=0)

        def step(i, totals):
            depth = i * tiles.depth
            depths = edge(depth, tiles.depth, k)
            if gather:  # index arrays in both dims: interpret mode does not mix them with slices
                at = source[:, None], (depth + jnp.arange(tiles.depth, dtype=jnp.int32))[None, :]
            else:
                at = pl.ds(row, tiles.rows), pl.ds(depth, tiles.depth)
            x = load(x_ref, at, outer(mine, depths, (tiles.rows, tiles.depth)))
            mask = outer(depths, cols, (tiles.depth, tiles.cols))

            def product(offset: int) -> jax.Array:
                at = jnp.minimum(group, groups - 1), pl.ds(depth, tiles.depth), pl.ds(offset + col, tiles.cols)
                return lax.dot_general(
                    x, load(w_ref, at, mask), (((1,), (0,)), ((), ())), precision(x.dtype), jnp.float32
                )

            return totals[0] + product(0), totals[1] + product(f)

        steps = jnp.where(group < groups, jnp.int32(pl.cdiv(k, tiles.depth)), jnp.int32(0))
        zeros = jnp.zeros((tiles.rows, tiles.cols), jnp.float32)
        gate, up = lax.fori_loop(jnp.int32(0), steps, step, (zeros, zeros))
        hidden = gate * jax.nn.sigmoid(gate) * up
        if scale_ref is not None:
            live = mine & (group < groups)
            hidden = hidden * pt.load(scale_ref.at[rows], mask=live, other=0.0).astype(jnp.float32)[:, None]
        mask = outer(mine, cols, (tiles.rows, tiles.cols))
        for ref, offset, value in ((hidden_ref, 0, hidden), (pre_ref, 0, gate), (pre_ref, f, up)):
            at = ref.at[pl.ds(row, tiles.rows), pl.ds(offset + col, tiles.cols)]
            pt.store(at, value.astype(ref.dtype), mask=mask)


def gated(
    lhs: jax.Array,
    gate_up: jax.Array,
    group_sizes: jax.Array,
    scale: jax.Array | None,
    index: jax.Array | None,
    *,
    kernel: Kernel,
) -> tuple[jax.Array, jax.Array]:
    """silu(x gate) * (x up) * scale for rows x of lhs, and both projections.

    Args:
        lhs: [T, K], read through `index`; [M, K] without it.
        gate_up: [G, K, 2 F], gate first.
        group_sizes: int32 [G].
        scale: [M], or None.
        index: Row of lhs for each row of the result, int32 [M], or None.
        kernel: Tiles and hooks.

    Returns:
        [M, F] and [M, 2 F] of the type of lhs, zero past the sum of sizes.
    """
    tiles = kernel.tiles or _TILES
    k, groups, f = lhs.shape[1], gate_up.shape[0], gate_up.shape[2] // 2
    m = lhs.shape[0] if index is None else index.shape[0]
    table = tile_table(group_sizes, m, tiles.rows)
    args = vary_like(table, lhs, gate_up, *(a for a in (index, scale) if a is not None))
    axes = varying_axes(*args)
    body = functools.partial(
        _kernel,
        tiles=tiles,
        shape=(table.shape[0], groups, f, k),
        gather=index is not None,
        scaled=scale is not None,
        reverse=kernel.reverse,
    )
    return pl.pallas_call(
        body,
        grid=(table.shape[0] * pl.cdiv(f, tiles.cols),),
        in_specs=[WHOLE] * len(args),
        out_specs=[WHOLE] * 2,
        out_shape=[output_type((m, f), lhs.dtype, axes), output_type((m, 2 * f), lhs.dtype, axes)],
        interpret=kernel.interpret,
        compiler_params=params(tiles),
        name="moejax_gated",
    )(*args)
