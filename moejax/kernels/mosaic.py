"""Grouped matmul for NVIDIA Hopper (sm_90): Pallas with the Mosaic GPU lowering, wgmma fed by TMA. bfloat16.

Never the table's own choice: no GPU has said yet that it is faster than the Triton lowering, which it must replace
before JAX removes that. Shared memory is read in tiles that no row offset may break, so row blocks are aligned to the
buffer, not to groups: a block that several groups share is multiplied once for each, and each stores its own rows.
At 256 rows a group 67% of the multiplied rows are used (79% for the Triton kernel, whose tiles start with groups).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as pg
from jax.typing import DTypeLike

from moejax.errors import UserError
from moejax.kernels.groups import bounds, visits
from moejax.kernels.kernel import Kernel, Tiles
from moejax.kernels.operands import Product, WeightGradient
from moejax.kernels.varying import vary_like
from moejax.varying import vary, varying_axes

_INTERPRETER = getattr(pg, "InterpretGPUParams", None)  # from jax 0.11 on
_ACCUMULATOR = pg.ACC  # pyright: ignore[reportPrivateImportUsage]

_TILES = Tiles(rows=128, cols=128, depth=64, stages=4)
_WGRAD_TILES = Tiles(rows=64, cols=128, depth=128, stages=4)


def _check(dtype: DTypeLike, **divisible: tuple[int, int]) -> None:
    """Raise UserError for what this kernel cannot do."""
    if _INTERPRETER is None:
        raise UserError(f"kernel backend mosaic: needs jax 0.11 or newer, this is {jax.__version__}; choose gpu")
    if dtype != jnp.bfloat16:
        raise UserError(f"kernel backend mosaic: multiplies bfloat16 only, not {jnp.dtype(dtype).name}; choose gpu")
    for name, (size, tile) in divisible.items():
        if size % tile:
            raise UserError(f"kernel backend mosaic: {name}={size} must be a multiple of its tile {tile}; choose gpu")


def _kernel(body, kernel: Kernel, args: tuple[jax.Array, ...], shape: tuple[int, ...], dtype: DTypeLike, **options):
    """Run `body` on a grid of programs of one warpgroup each."""
    interpret = {"interpret": _INTERPRETER()} if kernel.interpret and _INTERPRETER else {}
    out = pg.kernel(body, out_type=jax.ShapeDtypeStruct(shape, dtype), **options, **interpret)(*args)
    return vary(out, varying_axes(*args))  # the type of a result says nothing about mesh axes, whatever was asked for


def _store_rows(block, out, base, low, count, cols) -> None:
    """Store `count` rows of a block from row `low` of the buffer on, at once or in powers of two."""
    rows = block.shape[0]

    @pl.when(count >= rows)
    def _():
        pg.copy_smem_to_gmem(block, out.at[pl.ds(base, rows), cols])

    @pl.when(count < rows)
    def _():
        size = rows // 2
        while size:
            done = count // (2 * size) * (2 * size)

            @pl.when((count & size) != 0)
            def _(size=size, done=done):
                own = block.at[pl.ds(low - base + done, size)]
                pg.copy_smem_to_gmem(own, out.at[pl.ds(low + done, size), cols])

            size //= 2

    pg.wait_smem_to_gmem(0)


def _gmm_body(visit_ref, x_ref, w_ref, out_ref, block_ref, *, tiles: Tiles, groups: int, steps: int, transpose: bool):
    at, col = lax.axis_index("visit"), lax.axis_index("col")
    group, block, low, high = (visit_ref[at, i] for i in range(4))

    def store(value: jax.Array) -> None:
        block_ref[...] = value.astype(block_ref.dtype)
        pg.commit_smem()
        cols = pl.ds(col * tiles.cols, tiles.cols)
        _store_rows(block_ref, out_ref, block * tiles.rows, low, high - low, cols)

    def multiply(acc_ref) -> jax.Array:
        def step(_, x, w):
            pg.wgmma(acc_ref, x, w.transpose((1, 0)) if transpose else w)
            pg.wgmma_wait(0)

        if transpose:
            weight = pg.BlockSpec((tiles.cols, tiles.depth), lambda k: (col, k))
        else:
            weight = pg.BlockSpec((tiles.depth, tiles.cols), lambda k: (k, col))
        pg.emit_pipeline(
            step,
            grid=(steps,),
            in_specs=[pg.BlockSpec((tiles.rows, tiles.depth), lambda k: (block, k)), weight],
            max_concurrent_steps=tiles.stages,
        )(x_ref, w_ref.at[group])
        return acc_ref[...]

    @pl.when((high > low) & (group < groups))
    def _():
        store(pl.run_scoped(multiply, _ACCUMULATOR((tiles.rows, tiles.cols), jnp.float32)))

    @pl.when((high > low) & (group >= groups))
    def _():
        store(jnp.zeros((tiles.rows, tiles.cols), jnp.float32))


def gmm(call: Product, kernel: Kernel) -> jax.Array:
    """The product, [M, N]."""
    lhs, rhs, group_sizes, transpose_rhs, out_dtype = call
    tiles = kernel.tiles or _TILES
    m, k, n, groups = call.sizes
    _check(lhs.dtype, K=(k, tiles.depth), N=(n, tiles.cols))
    table = jnp.stack(visits(group_sizes, m, tiles.rows, tail=True, reverse=kernel.reverse), axis=1)
    return _kernel(
        functools.partial(_gmm_body, tiles=tiles, groups=groups, steps=k // tiles.depth, transpose=transpose_rhs),
        kernel,
        vary_like(table, lhs, rhs),
        (m, n),
        out_dtype,
        grid=(table.shape[0], n // tiles.cols),
        grid_names=("visit", "col"),
        kernel_name="moejax_gmm_transposed" if transpose_rhs else "moejax_gmm",
        scratch_types=[pg.SMEM((tiles.rows, tiles.cols), out_dtype)],
    )


def _wgrad_body(bounds_ref, x_ref, dy_ref, out_ref, block_ref, *, tiles: Tiles, groups: int, reverse: bool):
    group, at, col = (lax.axis_index(name) for name in ("group", "depth", "col"))
    group = groups - 1 - group if reverse else group
    start, end = bounds_ref[group, 0], bounds_ref[group, 1]
    first = start // tiles.rows
    count = jnp.where(end > start, (end + tiles.rows - 1) // tiles.rows - first, 0)

    def multiply(acc_ref) -> jax.Array:
        def step(i, x, dy):
            base = (first + i[0]) * tiles.rows

            @pl.when((base < start) | (base + tiles.rows > end))
            def _():
                for ref in (x, dy):
                    rows = base + pg.broadcasted_iota(jnp.int32, ref.shape, 0, layout=pg.Layout.WGMMA)
                    mine = (rows >= start) & (rows < end)
                    ref[...] = jnp.where(mine, ref[...], jnp.zeros(ref.shape, ref.dtype))
                pg.commit_smem()

            pg.wgmma(acc_ref, x.transpose((1, 0)), dy)
            pg.wgmma_wait(0)

        pg.emit_pipeline(
            step,
            grid=(count,),
            in_specs=[
                pg.BlockSpec((tiles.rows, tiles.depth), lambda i: (first + i, at)),
                pg.BlockSpec((tiles.rows, tiles.cols), lambda i: (first + i, col)),
            ],
            max_concurrent_steps=tiles.stages,
        )(x_ref, dy_ref)
        return acc_ref[...]

    total = pl.run_scoped(multiply, _ACCUMULATOR((tiles.depth, tiles.cols), jnp.float32))
    block_ref[...] = total.astype(block_ref.dtype)
    pg.commit_smem()
    depths, cols = pl.ds(at * tiles.depth, tiles.depth), pl.ds(col * tiles.cols, tiles.cols)
    pg.copy_smem_to_gmem(block_ref, out_ref.at[group, depths, cols])
    pg.wait_smem_to_gmem(0)


def wgrad(call: WeightGradient, kernel: Kernel) -> jax.Array:
    """The weight gradient, [G, K, N]."""
    lhs, grad, group_sizes, _, _ = call
    tiles = kernel.tiles or _WGRAD_TILES
    _, k, n, groups = call.sizes
    _check(lhs.dtype, K=(k, tiles.depth), N=(n, tiles.cols))
    total = _kernel(
        functools.partial(_wgrad_body, tiles=tiles, groups=groups, reverse=kernel.reverse),
        kernel,
        vary_like(jnp.stack(bounds(group_sizes), axis=1), lhs, grad),
        (groups, k, n),
        call.out_dtype,
        grid=(groups, k // tiles.depth, n // tiles.cols),
        grid_names=("group", "depth", "col"),
        kernel_name="moejax_gmm_wgrad",
        scratch_types=[pg.SMEM((tiles.depth, tiles.cols), call.out_dtype)],
    )
    return call.result(total)
