"""Both ends of an expert's hidden rows on NVIDIA GPUs (Triton lowering): made, and differentiated, in one kernel each.

Forward gathers token rows by index in its prologue, so that the K-fold copy of the activations is never written; its
epilogue applies the activation and the routing weight to accumulators that are still in registers. The gradient of
the hidden rows is never written either: the kernel that makes it ends with the gradient of the activation, and
writes the hidden rows, which the weight gradient of the down projection reads.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pt

from moejax.kernels.gpu import (
    WHOLE,
    contract,
    edge,
    load,
    outer,
    params,
    place,
    tile_table,
)
from moejax.kernels.kernel import Kernel, Tiles
from moejax.kernels.operands import precision
from moejax.kernels.varying import output_type, vary_like
from moejax.varying import varying_axes

_TILES = Tiles(rows=128, cols=128, depth=64, warps=8, stages=3)  # two accumulators; four warps spill registers

_REGISTERS = 128  # of the 255 of a thread, for float32 blocks; two fit at 128x128 and eight warps


def fit(tiles: Tiles, blocks: int) -> Tiles:
    """Tiles of a matmul for a kernel that holds `blocks` float32 blocks at once: fewer columns, or registers spill."""
    cols = tiles.cols
    while blocks * tiles.rows * cols > _REGISTERS * 32 * tiles.warps and cols > 16:
        cols //= 2
    return dataclasses.replace(tiles, cols=cols)


def _hidden_kernel(table_ref, x_ref, w_ref, *refs, activation, tiles, shape, gather: bool, scaled: bool, reverse: bool):
    refs = list(refs)
    index_ref = refs.pop(0) if gather else None
    scale_ref = refs.pop(0) if scaled else None
    hidden_ref, pre_ref = refs
    groups, f, inner, k = shape
    group, row, end, _col_tile, col = place(table_ref, f, tiles, reverse)

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

            def product(part: int) -> jax.Array:
                at = jnp.minimum(group, groups - 1), pl.ds(depth, tiles.depth), pl.ds(part * f + col, tiles.cols)
                return lax.dot_general(
                    x, load(w_ref, at, mask), (((1,), (0,)), ((), ())), precision(x.dtype), jnp.float32
                )

            return tuple(total + product(part) for part, total in enumerate(totals))

        steps = jnp.where(group < groups, jnp.int32(pl.cdiv(k, tiles.depth)), jnp.int32(0))
        zeros = jnp.zeros((tiles.rows, tiles.cols), jnp.float32)
        totals = lax.fori_loop(jnp.int32(0), steps, step, (zeros,) * inner)
        hidden = activation(totals[0], totals[-1])
        if scale_ref is not None:
            hidden = hidden * _scale(scale_ref, rows, mine)
        mask = outer(mine, cols, (tiles.rows, tiles.cols))
        _store(hidden_ref, row, col, hidden, mask, tiles)
        for part, value in enumerate(totals):
            _store(pre_ref, row, part * f + col, value, mask, tiles)


def _scale(ref, rows: jax.Array, mine: jax.Array) -> jax.Array:
    return pt.load(ref.at[rows], mask=mine, other=0.0).astype(jnp.float32)[:, None]


def _store(ref, row, col, value: jax.Array, mask: jax.Array | None, tiles: Tiles) -> None:
    pt.store(ref.at[pl.ds(row, tiles.rows), pl.ds(col, tiles.cols)], value.astype(ref.dtype), mask=mask)


def hidden_rows(
    lhs: jax.Array,
    up: jax.Array,
    group_sizes: jax.Array,
    scale: jax.Array | None,
    index: jax.Array | None,
    *,
    activation,
    kernel: Kernel,
) -> tuple[jax.Array, jax.Array]:
    """activation(x gate, x up) * scale for rows x of lhs, and the projections.

    Args:
        lhs: [T, D], read through `index`; [M, D] without it.
        up: [G, D, g, F], gate first.
        group_sizes: int32 [G].
        scale: float32 [M], or None.
        index: Row of lhs for each row of the result, int32 [M], or None.
        activation: Elementwise, of gate and up; zeros give zero.
        kernel: Tiles and hooks.

    Returns:
        [M, F] and [M, g F] of the type of lhs; past the sum of sizes the second is zero, the first may be anything.
    """
    groups, k, inner, f = up.shape
    tiles = fit(kernel.tiles or _TILES, inner)
    m = lhs.shape[0] if index is None else index.shape[0]
    table = tile_table(group_sizes, m, tiles.rows)
    args = vary_like(table, lhs, up.reshape(groups, k, -1), *(a for a in (index, scale) if a is not None))
    axes = varying_axes(*args)
    body = functools.partial(
        _hidden_kernel,
        activation=activation,
        tiles=tiles,
        shape=(groups, f, inner, k),
        gather=index is not None,
        scaled=scale is not None,
        reverse=kernel.reverse,
    )
    return pl.pallas_call(
        body,
        grid=(table.shape[0] * pl.cdiv(f, tiles.cols),),
        in_specs=[WHOLE] * len(args),
        out_specs=[WHOLE] * 2,
        out_shape=[output_type((m, f), lhs.dtype, axes), output_type((m, inner * f), lhs.dtype, axes)],
        interpret=kernel.interpret,
        compiler_params=params(tiles),
        name="moejax_ffn_hidden",
    )(*args)


def _gradient_kernel(table_ref, dy_ref, w_ref, pre_ref, *refs, activation, tiles, shape, scaled: bool, reverse: bool):
    hidden_ref, grad_ref = refs[scaled : scaled + 2]
    groups, f, inner, k = shape
    group, row, end, col_tile, col = place(table_ref, f, tiles, reverse)

    @pl.when(end > row)
    def _():
        rows = row + jnp.arange(tiles.rows, dtype=jnp.int32)
        mine, cols = rows < end, edge(col, tiles.cols, f)
        grad = contract(dy_ref, w_ref, group, groups, row, mine, col, tiles, f, k, transpose=True)
        mask = outer(mine, cols, (tiles.rows, tiles.cols))
        at = [(pl.ds(row, tiles.rows), pl.ds(part * f + col, tiles.cols)) for part in range(inner)]

        def differentiate():
            parts = (load(pre_ref, block, mask).astype(jnp.float32) for block in at)
            return jax.vjp(lambda *parts: activation(parts[0], parts[-1]), *parts)

        hidden = differentiate()[0]
        if scaled:  # one summand of the gradient of the scale for every tile of columns
            pt.store(refs[-1].at[col_tile, rows], jnp.sum(grad * hidden, axis=1), mask=mine)
            scale = _scale(refs[0], rows, mine)
            hidden, grad = hidden * scale, grad * scale
        _store(hidden_ref, row, col, hidden, mask, tiles)
        for part in range(inner):  # projections are loaded again, after a store: to keep all in registers spills them
            _store(grad_ref, row, part * f + col, differentiate()[1](grad)[part], mask, tiles)


def hidden_gradients(
    grad: jax.Array,
    down: jax.Array,
    pre: jax.Array,
    group_sizes: jax.Array,
    scale: jax.Array | None,
    *,
    activation,
    kernel: Kernel,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Hidden rows from their projections, and the gradients of projections and scale.

    Args:
        grad: Gradient of the result, [M, D].
        down: [G, F, D].
        pre: Projections [M, g F], gate first.
        group_sizes: int32 [G].
        scale: As in `hidden_rows`.
        activation: As in `hidden_rows`.
        kernel: Tiles and hooks.

    Returns:
        [M, F] and [M, g F] of the type of grad, float32 [M] or None; past the sum of sizes the last is zero, the
        others may be anything.
    """
    tiles = fit(kernel.tiles or _TILES, 2)
    (m, k), (groups, f, _) = grad.shape, down.shape
    table = tile_table(group_sizes, m, tiles.rows)
    args = vary_like(table, grad, down, pre, *(() if scale is None else (scale,)))
    axes, num_cols = varying_axes(*args), pl.cdiv(f, tiles.cols)
    body = functools.partial(
        _gradient_kernel,
        activation=activation,
        tiles=tiles,
        shape=(groups, f, pre.shape[1] // f, k),
        scaled=scale is not None,
        reverse=kernel.reverse,
    )
    outputs = [output_type((m, f), grad.dtype, axes), output_type(pre.shape, grad.dtype, axes)]
    if scale is not None:
        outputs.append(output_type((num_cols, m), jnp.float32, axes))
    hidden, grad_pre, *shares = pl.pallas_call(
        body,
        grid=(table.shape[0] * num_cols,),
        in_specs=[WHOLE] * len(args),
        out_specs=[WHOLE] * len(outputs),
        out_shape=outputs,
        interpret=kernel.interpret,
        compiler_params=params(tiles),
        name="moejax_ffn_gradient",
    )(*args)
    return hidden, grad_pre, jnp.sum(shares[0], axis=0) if shares else None
