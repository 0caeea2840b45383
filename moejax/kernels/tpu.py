"""Grouped matmul for TPUs: Pallas with a scalar-prefetched table of row blocks.

Row blocks are aligned to the buffer, not to groups. A block that several groups share is visited once per
group, in order; each visit writes its own rows and keeps the others'. Rows past the last group form one more
group, whose visits store zeros and fetch nothing new.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as ptpu

from moejax.kernels.groups import visits
from moejax.kernels.kernel import Kernel, Tiles
from moejax.kernels.operands import Product, WeightGradient, precision
from moejax.kernels.varying import output_type, vary_like
from moejax.varying import varying_axes

_TILES = Tiles(rows=512, cols=512, depth=1024)


def _owned(lo: jax.Array, hi: jax.Array, base: jax.Array, shape: tuple[int, int]) -> jax.Array:
    row = base + lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= lo) & (row < hi)


def _zero_from(array: jax.Array, axis: int, limit: jax.Array) -> jax.Array:
    """`array` with indices from `limit` on along `axis` set to zero: a block's reach past the operand is garbage."""
    index = lax.broadcasted_iota(jnp.int32, array.shape, axis)
    return jnp.where(index < limit, array.astype(jnp.float32), 0.0).astype(array.dtype)


def _gmm_kernel(group, block, lo, hi, x_ref, w_ref, out_ref, acc_ref, *, k: int, groups: int, transpose: bool):
    visit, step, steps = pl.program_id(1), pl.program_id(2), pl.num_programs(2)
    rows, depth = x_ref.shape
    some = hi[visit] > lo[visit]

    @pl.when(step == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def multiply(x: jax.Array, w: jax.Array) -> None:
        dims = (((1,), (1 if transpose else 0,)), ((), ()))
        acc_ref[...] += lax.dot_general(x, w, dims, precision(x.dtype), jnp.float32)

    real, broken = some & (group[visit] < groups), (step == steps - 1) & (k % depth != 0)

    @pl.when(real & jnp.logical_not(broken))
    def _():
        multiply(x_ref[...], w_ref[...])

    if k % depth:

        @pl.when(real & broken)
        def _():
            multiply(_zero_from(x_ref[...], 1, k % depth), _zero_from(w_ref[...], 1 if transpose else 0, k % depth))

    base = block[visit] * rows
    full = (lo[visit] == base) & (hi[visit] == base + rows)

    @pl.when((step == steps - 1) & some & full)
    def _():
        out_ref[...] = acc_ref[...].astype(out_ref.dtype)

    @pl.when((step == steps - 1) & some & jnp.logical_not(full))
    def _():
        mine = _owned(lo[visit], hi[visit], base, out_ref.shape)
        out_ref[...] = jnp.where(mine, acc_ref[...], out_ref[...].astype(jnp.float32)).astype(out_ref.dtype)


def gmm(call: Product, kernel: Kernel) -> jax.Array:
    """The product, [M, N]."""
    lhs, rhs, group_sizes, transpose_rhs, out_dtype = call
    tiles = kernel.tiles or _TILES
    m, k, n, groups = call.sizes
    rows, depth, cols = min(tiles.rows, m), min(tiles.depth, k), min(tiles.cols, n)
    steps = pl.cdiv(k, depth)
    table = visits(group_sizes, m, rows, tail=True, reverse=kernel.reverse)
    args = vary_like(*table, lhs, rhs)

    def step_of(i, step, group):
        return jnp.where(group[i] < groups, step, steps - 1)  # the tail asks for the block that is already there

    def x_block(col, i, step, group, block, lo, hi):
        return jnp.where(group[i] < groups, block[i], 0), step_of(i, step, group)

    def w_block(col, i, step, group, block, lo, hi):
        own, at = jnp.minimum(group[i], groups - 1), step_of(i, step, group)
        return (own, col, at) if transpose_rhs else (own, at, col)

    moved = m * k * pl.cdiv(n, cols) + groups * k * n + m * n
    return pl.pallas_call(
        functools.partial(_gmm_kernel, k=k, groups=groups, transpose=transpose_rhs),
        out_shape=output_type((m, n), out_dtype, varying_axes(*args)),
        grid_spec=ptpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(n, cols), table.group.shape[0], steps),
            in_specs=[
                pl.BlockSpec((rows, depth), x_block),
                pl.BlockSpec((None, cols, depth) if transpose_rhs else (None, depth, cols), w_block),
            ],
            out_specs=pl.BlockSpec((rows, cols), lambda col, i, step, group, block, lo, hi: (block[i], col)),
            scratch_shapes=[ptpu.VMEM((rows, cols), jnp.float32)],
        ),
        interpret=kernel.interpret,
        compiler_params=ptpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * k * n, bytes_accessed=lhs.dtype.itemsize * moved, transcendentals=0
        ),
        name="moejax_gmm_transposed" if transpose_rhs else "moejax_gmm",
    )(*args)


def _wgrad_kernel(group, block, lo, hi, x_ref, dy_ref, *refs):
    out_ref, acc_ref = refs[-2:]
    visit, last = pl.program_id(2), pl.num_programs(2) - 1
    base = block[visit] * x_ref.shape[0]
    some, full = hi[visit] > lo[visit], (lo[visit] == base) & (hi[visit] == base + x_ref.shape[0])

    @pl.when((visit == 0) | (group[visit] != group[jnp.maximum(visit - 1, 0)]))
    def _():
        acc_ref[...] = refs[0][...] if len(refs) == 3 else jnp.zeros_like(acc_ref)

    def multiply(x: jax.Array, dy: jax.Array) -> None:
        acc_ref[...] += lax.dot_general(x, dy, (((0,), (0,)), ((), ())), precision(x.dtype), jnp.float32)

    @pl.when(full)
    def _():
        multiply(x_ref[...], dy_ref[...])

    def own_rows(ref) -> jax.Array:
        mine = _owned(lo[visit], hi[visit], base, ref.shape)
        return jnp.where(mine, ref[...].astype(jnp.float32), 0.0).astype(ref.dtype)

    @pl.when(some & jnp.logical_not(full))
    def _():
        multiply(own_rows(x_ref), own_rows(dy_ref))

    @pl.when((visit == last) | (group[visit] != group[jnp.minimum(visit + 1, last)]))
    def _():
        out_ref[...] = acc_ref[...].astype(out_ref.dtype)


def wgrad(call: WeightGradient, kernel: Kernel) -> jax.Array:
    """The weight gradient, [G, K, N]."""
    lhs, grad, group_sizes, out_dtype, accumulator = call
    tiles = kernel.tiles or Tiles(rows=512, cols=512, depth=512)
    m, k, n, groups = call.sizes
    rows, depth, cols = min(tiles.rows, m), min(tiles.depth, k), min(tiles.cols, n)
    table = visits(group_sizes, m, rows, tail=False, reverse=kernel.reverse)
    extra = () if accumulator is None else (accumulator,)
    in_place = accumulator is not None and not kernel.interpret  # the interpreter cannot alias broken blocks
    args = vary_like(*table, lhs, grad, *extra)
    weight = pl.BlockSpec((None, depth, cols), lambda at, col, i, group, block, lo, hi: (group[i], at, col))
    moved = m * k * pl.cdiv(n, cols) + m * n * pl.cdiv(k, depth) + groups * k * n
    return pl.pallas_call(
        _wgrad_kernel,
        out_shape=output_type((groups, k, n), out_dtype, varying_axes(*args)),
        input_output_aliases={6: 0} if in_place else {},
        grid_spec=ptpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(k, depth), pl.cdiv(n, cols), table.group.shape[0]),
            in_specs=[
                pl.BlockSpec((rows, depth), lambda at, col, i, group, block, lo, hi: (block[i], at)),
                pl.BlockSpec((rows, cols), lambda at, col, i, group, block, lo, hi: (block[i], col)),
                *([weight] * len(extra)),
            ],
            out_specs=weight,
            scratch_shapes=[ptpu.VMEM((depth, cols), jnp.float32)],
        ),
        interpret=kernel.interpret,
        compiler_params=ptpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * k * n, bytes_accessed=lhs.dtype.itemsize * moved, transcendentals=0
        ),
        name="moejax_gmm_wgrad",
    )(*args)
