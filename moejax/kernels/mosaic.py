"""Grouped matmul for NVIDIA Hopper (sm_90): Pallas with the Mosaic GPU lowering, wgmma fed by TMA. bfloat16.

Programs are warp-specialised: one warpgroup keeps the loads of `stages` steps in flight, two multiply, each its half
of the columns, and the hardware gives them the loader's registers.

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

_WORKERS = 2  # warpgroups that multiply; one more loads
_LOADER_REGISTERS = 40  # of a thread; the hardware gives what it leaves to the workers
_STRIP = 64  # columns that a worker stores or clears at once: shared memory and registers are for the product


def _gmm_tiles(n: int) -> Tiles:
    return Tiles(rows=128, cols=256 if n % 256 == 0 else 128, depth=64, stages=3)


def _wgrad_tiles(n: int) -> Tiles:
    return Tiles(rows=64, cols=256 if n % 256 == 0 else 128, depth=128, stages=3)


def _check(dtype: DTypeLike, tiles: Tiles, **divisible: tuple[int, int]) -> None:
    """Raise UserError for what this kernel cannot do."""
    if _INTERPRETER is None:
        raise UserError(f"kernel backend mosaic: needs jax 0.11 or newer, this is {jax.__version__}; choose gpu")
    if dtype != jnp.bfloat16:
        raise UserError(f"kernel backend mosaic: multiplies bfloat16 only, not {jnp.dtype(dtype).name}; choose gpu")
    if tiles.cols % (_WORKERS * _STRIP):
        raise UserError(f"kernel backend mosaic: tile cols={tiles.cols} must be a multiple of {_WORKERS * _STRIP}")
    for name, (size, tile) in divisible.items():
        if size % tile:
            raise UserError(f"kernel backend mosaic: {name}={size} must be a multiple of its tile {tile}; choose gpu")


def _aligned(rows: jax.Array) -> jax.Array:
    """Rows up to a multiple of 8, which TMA's tiling wants: a copy, but for the buffers that training has."""
    return jnp.pad(rows, ((0, -rows.shape[0] % 8), (0, 0)))


def _kernel(body, kernel: Kernel, args: tuple[jax.Array, ...], shape: tuple[int, ...], dtype: DTypeLike, **options):
    """Run `body` on a grid of programs of three warpgroups each."""
    interpret = {"interpret": _INTERPRETER()} if kernel.interpret and _INTERPRETER else {}
    out = pg.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        num_threads=_WORKERS + 1,
        thread_name="warpgroup",
        **options,
        **interpret,
    )(*args)
    return vary(out, varying_axes(*args))  # the type of a result says nothing about mesh axes, whatever was asked for


def _contract(step, store, operands, specs, *, steps, shape: tuple[int, int], stages: int) -> None:
    """Sum `step` over `steps` blocks of the operands in each worker, then `store` the sum, float32 of `shape`."""

    def work(run) -> None:
        def multiply(acc_ref):
            run(acc_ref)
            return acc_ref[...]

        store(pl.run_scoped(multiply, _ACCUMULATOR(shape, jnp.float32)))

    def body(index, x_ref, y_ref, acc_ref):
        step(index[0], x_ref, y_ref, acc_ref)
        pg.wgmma_wait(0)
        return acc_ref

    pg.emit_pipeline_warp_specialized(
        body,
        grid=(steps,),
        in_specs=specs,
        max_concurrent_steps=stages,
        memory_registers=_LOADER_REGISTERS,
        wg_axis="warpgroup",
        num_compute_wgs=_WORKERS,
        compute_context=work,
    )(*operands)


def _store(value: jax.Array, block_ref, out_ref, base, low, high, first) -> None:
    """Store rows `low` to `high` of a worker's block [rows, cols], which lies at row `base` and column `first`."""
    for col in range(0, value.shape[1], _STRIP):
        block_ref[...] = value[:, col : col + _STRIP].astype(block_ref.dtype)
        pg.commit_smem()
        _store_rows(block_ref, out_ref.at[:, pl.ds(first + col, _STRIP)], base, low, high)
        pg.wait_smem_to_gmem(0)


def _store_rows(block_ref, out_ref, base, low, high) -> None:
    """Copy rows of a block, at once or in powers of two: a copy's size is fixed when it is compiled."""
    rows, count = block_ref.shape[0], high - low

    @pl.when(count >= rows)
    def _():
        pg.copy_smem_to_gmem(block_ref, out_ref.at[pl.ds(base, rows)])

    size = rows // 2
    while size:
        done = low + count // (2 * size) * (2 * size)

        @pl.when((count < rows) & ((count & size) != 0))
        def _(size=size, done=done):
            pg.copy_smem_to_gmem(block_ref.at[pl.ds(done - base, size)], out_ref.at[pl.ds(done, size)])

        size //= 2


def _gmm_body(visit_ref, x_ref, w_ref, out_ref, blocks_ref, *, tiles: Tiles, groups: int, steps: int, transpose: bool):
    at, col, worker = (lax.axis_index(name) for name in ("visit", "col", "warpgroup"))
    group, block, low, high = (visit_ref[at, i] for i in range(4))
    half = tiles.cols // _WORKERS
    own = pl.ds(worker * half, half)

    def store(value: jax.Array) -> None:
        _store(value, blocks_ref.at[worker], out_ref, block * tiles.rows, low, high, col * tiles.cols + worker * half)

    def step(_, x, w, acc_ref):
        pg.wgmma(acc_ref, x, w.at[own].transpose((1, 0)) if transpose else w.at[:, own])

    if transpose:
        weight = pg.BlockSpec((tiles.cols, tiles.depth), lambda k: (col, k))
    else:
        weight = pg.BlockSpec((tiles.depth, tiles.cols), lambda k: (k, col))

    @pl.when((high > low) & (group < groups))
    def _():
        _contract(
            step,
            store,
            (x_ref, w_ref.at[group]),
            [pg.BlockSpec((tiles.rows, tiles.depth), lambda k: (block, k)), weight],
            steps=steps,
            shape=(tiles.rows, half),
            stages=tiles.stages,
        )

    @pl.when((high > low) & (group >= groups) & (worker < _WORKERS))
    def _():
        store(jnp.zeros((tiles.rows, half), jnp.float32))


def gmm(call: Product, kernel: Kernel) -> jax.Array:
    """The product, [M, N]."""
    lhs, rhs, group_sizes, transpose_rhs, out_dtype = call
    m, k, n, groups = call.sizes
    tiles = kernel.tiles or _gmm_tiles(n)
    _check(lhs.dtype, tiles, K=(k, tiles.depth), N=(n, tiles.cols))
    lhs = _aligned(lhs)
    table = jnp.stack(visits(group_sizes, lhs.shape[0], tiles.rows, tail=True, reverse=kernel.reverse), axis=1)
    out = _kernel(
        functools.partial(_gmm_body, tiles=tiles, groups=groups, steps=k // tiles.depth, transpose=transpose_rhs),
        kernel,
        vary_like(table, lhs, rhs),
        (lhs.shape[0], n),
        out_dtype,
        grid=(table.shape[0], n // tiles.cols),
        grid_names=("visit", "col"),
        kernel_name="moejax_gmm_transposed" if transpose_rhs else "moejax_gmm",
        scratch_types=[pg.SMEM((_WORKERS, tiles.rows, _STRIP), out_dtype)],
    )
    return out[:m]


def _wgrad_body(bounds_ref, x_ref, dy_ref, out_ref, blocks_ref, met_ref, *, tiles: Tiles, groups: int, reverse: bool):
    group, at, col, worker = (lax.axis_index(name) for name in ("group", "depth", "col", "warpgroup"))
    group = groups - 1 - group if reverse else group
    start, end = bounds_ref[group, 0], bounds_ref[group, 1]
    first = start // tiles.rows
    half, part = tiles.cols // _WORKERS, tiles.depth // _WORKERS
    own = pl.ds(worker * half, half)

    def step(i, x, dy, acc_ref):
        base = (first + i) * tiles.rows

        @pl.when((base < start) | (base + tiles.rows > end))  # rows of others, or of nobody: zero, whatever they hold
        def _():
            strips = [dy.at[:, pl.ds(worker * half + strip, _STRIP)] for strip in range(0, half, _STRIP)]
            for ref in (x.at[:, pl.ds(worker * part, part)], *strips):
                rows = base + pg.broadcasted_iota(jnp.int32, ref.shape, 0, layout=pg.Layout.WGMMA)
                mine = (rows >= start) & (rows < end)
                ref[...] = jnp.where(mine, ref[...], jnp.zeros(ref.shape, ref.dtype))
            pg.commit_smem()
            pg.barrier_arrive(met_ref)  # each worker cleared a part of x and reads all of it
            pg.barrier_wait(met_ref)

        pg.wgmma(acc_ref, x.transpose((1, 0)), dy.at[:, own])

    def store(total: jax.Array) -> None:
        row, width = at * tiles.depth, tiles.depth
        _store(total, blocks_ref.at[worker], out_ref.at[group], row, row, row + width, col * tiles.cols + worker * half)

    _contract(
        step,
        store,
        (x_ref, dy_ref),
        [
            pg.BlockSpec((tiles.rows, tiles.depth), lambda i: (first + i, at)),
            pg.BlockSpec((tiles.rows, tiles.cols), lambda i: (first + i, col)),
        ],
        steps=jnp.where(end > start, (end + tiles.rows - 1) // tiles.rows - first, 0),
        shape=(tiles.depth, half),
        stages=tiles.stages,
    )


def wgrad(call: WeightGradient, kernel: Kernel) -> jax.Array:
    """The weight gradient, [G, K, N]."""
    lhs, grad, group_sizes, _, _ = call
    _, k, n, groups = call.sizes
    tiles = kernel.tiles or _wgrad_tiles(n)
    _check(lhs.dtype, tiles, K=(k, tiles.depth), N=(n, tiles.cols))
    total = _kernel(
        functools.partial(_wgrad_body, tiles=tiles, groups=groups, reverse=kernel.reverse),
        kernel,
        vary_like(jnp.stack(bounds(group_sizes), axis=1), _aligned(lhs), _aligned(grad)),
        (groups, k, n),
        call.out_dtype,
        grid=(groups, k // tiles.depth, n // tiles.cols),
        grid_names=("group", "depth", "col"),
        kernel_name="moejax_gmm_wgrad",
        scratch_types=[
            pg.SMEM((_WORKERS, tiles.depth, _STRIP), call.out_dtype),
            pg.Barrier(num_arrivals=_WORKERS),
        ],
    )
    return call.result(total)
