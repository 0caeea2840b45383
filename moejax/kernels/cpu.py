"""Grouped matmul for XLA:CPU: one loop over (group, window of rows) whose trip count is data.

A window is multiplied by its group's weight and written back under a row mask, so that groups need no
alignment, padding or copy. Work is that of the rows in use, whatever the static buffer holds.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from moejax.kernels.groups import bounds, max_tiles, row_tiles
from moejax.kernels.kernel import Kernel
from moejax.varying import vary, varying_axes

# XLA:CPU before 0.11 multiplies small bfloat16 blocks slower than float32 ones, cast included; later ones do not.
_WIDEN_BFLOAT16 = jax.__version_info__ < (0, 11)


def _window_rows(num_rows: int, num_groups: int, kernel: Kernel) -> int:
    """Rows of a window: as asked for, or 64, or 32 when groups are small on average."""
    if kernel.tiles is not None:
        return min(num_rows, kernel.tiles.rows)
    return min(num_rows, 32 if num_rows <= 32 * num_groups else 64)


def _widen(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if _WIDEN_BFLOAT16 else array


def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool,
    out_dtype: DTypeLike,
    kernel: Kernel,
) -> jax.Array:
    """Multiply rows of lhs [M, K] by their group's matrix: rhs [G, K, N], or [G, N, K] with `transpose_rhs`."""
    num_rows, num_groups = lhs.shape[0], rhs.shape[0]
    out = jnp.zeros((num_rows, rhs.shape[1] if transpose_rhs else rhs.shape[2]), out_dtype)
    out = vary(out, varying_axes(lhs, rhs, group_sizes))
    size = _window_rows(num_rows, num_groups, kernel)
    tiles = row_tiles(group_sizes, max_tiles(num_rows, num_groups, size), size)
    first = jnp.minimum(tiles.row, num_rows - size)  # a window at the end of the buffer reaches back
    dims = (((1,), (1 if transpose_rhs else 0,)), ((), ()))
    lhs, rhs = _widen(lhs), _widen(rhs)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        x = lax.dynamic_slice_in_dim(lhs, first[i], size)
        w = lax.dynamic_index_in_dim(rhs, tiles.group[i], 0, keepdims=False)
        y = lax.dot_general(x, w, dims, preferred_element_type=jnp.float32).astype(out_dtype)
        row = first[i] + jnp.arange(size, dtype=jnp.int32)
        mine = (row >= tiles.row[i]) & (row < tiles.end[i])
        y = jnp.where(mine[:, None], y, lax.dynamic_slice_in_dim(out, first[i], size))
        return lax.dynamic_update_slice_in_dim(out, y, first[i], 0)

    return lax.fori_loop(jnp.zeros_like(tiles.count), tiles.count, body, out)


def wgrad(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: DTypeLike,
    accumulator: jax.Array | None,
    kernel: Kernel,
) -> jax.Array:
    """Sum of lhs[row]^T grad[row] over each group's rows, [G, K, N]; added to a float32 `accumulator` if given."""
    (num_rows, k), n, num_groups = lhs.shape, grad.shape[1], group_sizes.shape[0]
    axes = varying_axes(lhs, grad, group_sizes)
    total = accumulator if accumulator is not None else vary(jnp.zeros((num_groups, k, n), out_dtype), axes)
    size = _window_rows(num_rows, num_groups, kernel)
    start, end = bounds(group_sizes)
    lhs, grad = _widen(lhs), _widen(grad)

    def add_group(group: jax.Array, total: jax.Array) -> jax.Array:
        def add_window(i: jax.Array, product: jax.Array) -> jax.Array:
            begin = start[group] + i * size
            first = jnp.minimum(begin, num_rows - size)
            row = first + jnp.arange(size, dtype=jnp.int32)
            mine = ((row >= begin) & (row < end[group]))[:, None]
            x = jnp.where(mine, lax.dynamic_slice_in_dim(lhs, first, size), 0)
            dy = jnp.where(mine, lax.dynamic_slice_in_dim(grad, first, size), 0)
            dims = (((0,), (0,)), ((), ()))
            return product + lax.dot_general(x, dy, dims, preferred_element_type=jnp.float32)

        if accumulator is None:
            product = vary(jnp.zeros((k, n), jnp.float32), axes)
        else:
            product = lax.dynamic_index_in_dim(total, group, 0, keepdims=False)
        windows = (end[group] - start[group] + size - 1) // size
        product = lax.fori_loop(jnp.zeros_like(windows), windows, add_window, product)
        return lax.dynamic_update_index_in_dim(total, product.astype(total.dtype), group, 0)

    return lax.fori_loop(jnp.int32(0), jnp.int32(num_groups), add_group, total)
