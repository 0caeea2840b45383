"""Grouped matmul for XLA:CPU: loops over windows of rows whose trip counts are data.

A group is cut into windows of a few sizes, large ones first, like a number into binary digits: large windows
read a weight once for many rows, small ones waste few rows at the group's end. One loop per size multiplies
each window by its group's weight and writes it back under a row mask, so that groups need no alignment,
padding or copy. Work is that of the rows in use, whatever the static buffer holds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels.groups import bounds, count_ends
from moejax.kernels.kernel import Kernel
from moejax.kernels.operands import Product, WeightGradient
from moejax.varying import vary

# XLA:CPU before 0.11 multiplies small bfloat16 blocks slower than float32 ones, cast included; later ones do not.
_WIDEN_BFLOAT16 = jax.__version_info__ < (0, 11)

_LARGEST = 256  # rows of the largest window: from here on a window is as fast per row as a dense matmul


class Windows(NamedTuple):
    """Windows of `size` rows (static): group g has count[g] of them, one after the other from row first[g]."""

    size: int
    first: jax.Array
    count: jax.Array


def _windows(group_sizes: jax.Array, num_rows: int, kernel: Kernel) -> list[Windows]:
    """Windows of every size, largest first. A window costs as much as about 20 more rows, so 16 rows are least."""
    mean = num_rows / group_sizes.shape[0]
    least = kernel.tiles.rows if kernel.tiles else 16 if mean <= 32 else 32
    least = min(least, num_rows)
    size = least
    while 2 * size <= min(_LARGEST, num_rows):
        size *= 2
    first, left = bounds(group_sizes).start, -(-group_sizes // least)  # left: in units of the least window
    found = []
    while size >= least:
        unit = size // least
        found.append(Windows(size, first, left // unit))
        first, left = first + left // unit * size, left % unit
        size //= 2
    return found


def _widen(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if _WIDEN_BFLOAT16 else array


def gmm(call: Product, kernel: Kernel) -> jax.Array:
    """The product, [M, N]."""
    lhs, rhs, group_sizes, transpose_rhs, out_dtype = call
    num_rows, _, n, num_groups = call.sizes
    out = vary(jnp.zeros((num_rows, n), out_dtype), call.axes)
    dims = (((1,), (1 if transpose_rhs else 0,)), ((), ()))
    lhs, rhs = _widen(lhs), _widen(rhs)
    group_end = bounds(group_sizes).end

    def loop(windows: Windows, out: jax.Array) -> jax.Array:
        size, window_end = windows.size, jnp.cumsum(windows.count, dtype=jnp.int32)
        index = jnp.arange(num_rows // size + num_groups, dtype=jnp.int32)
        group = jnp.minimum(count_ends(index, window_end), num_groups - 1)
        begin = windows.first[group] + (index - (window_end - windows.count)[group]) * size
        end, start = group_end[group], jnp.minimum(begin, num_rows - size)  # the last window reaches back

        def body(i: jax.Array, out: jax.Array) -> jax.Array:
            x = lax.dynamic_slice_in_dim(lhs, start[i], size)
            w = lax.dynamic_index_in_dim(rhs, group[i], 0, keepdims=False)
            y = lax.dot_general(x, w, dims, preferred_element_type=jnp.float32).astype(out_dtype)
            row = start[i] + jnp.arange(size, dtype=jnp.int32)
            mine = ((row >= begin[i]) & (row < end[i]))[:, None]
            y = jnp.where(mine, y, lax.dynamic_slice_in_dim(out, start[i], size))
            return lax.dynamic_update_slice_in_dim(out, y, start[i], 0)

        return lax.fori_loop(jnp.zeros_like(window_end[-1]), window_end[-1], body, out)

    for windows in _windows(group_sizes, num_rows, kernel):
        out = loop(windows, out)
    return out


def wgrad(call: WeightGradient, kernel: Kernel) -> jax.Array:
    """The weight gradient, [G, K, N]."""
    lhs, grad, group_sizes, out_dtype, accumulator = call
    num_rows, k, n, num_groups = call.sizes
    total = accumulator if accumulator is not None else vary(jnp.zeros((num_groups, k, n), out_dtype), call.axes)
    lhs, grad = _widen(lhs), _widen(grad)
    group_end, all_windows = bounds(group_sizes).end, _windows(group_sizes, num_rows, kernel)
    dims = (((0,), (0,)), ((), ()))

    def add_windows(group: jax.Array, windows: Windows, product: jax.Array) -> jax.Array:
        size = windows.size

        def body(i: jax.Array, product: jax.Array) -> jax.Array:
            begin = windows.first[group] + i * size
            start = jnp.minimum(begin, num_rows - size)
            row = start + jnp.arange(size, dtype=jnp.int32)
            mine = ((row >= begin) & (row < group_end[group]))[:, None]
            x = jnp.where(mine, lax.dynamic_slice_in_dim(lhs, start, size), 0)
            dy = jnp.where(mine, lax.dynamic_slice_in_dim(grad, start, size), 0)
            return product + lax.dot_general(x, dy, dims, preferred_element_type=jnp.float32)

        count = windows.count[group]
        return lax.fori_loop(jnp.zeros_like(count), count, body, product)

    def add_group(group: jax.Array, total: jax.Array) -> jax.Array:
        if accumulator is None:
            product = vary(jnp.zeros((k, n), jnp.float32), call.axes)
        else:
            product = lax.dynamic_index_in_dim(total, group, 0, keepdims=False)
        for windows in all_windows:
            product = add_windows(group, windows, product)
        return lax.dynamic_update_index_in_dim(total, product.astype(total.dtype), group, 0)

    return lax.fori_loop(jnp.int32(0), jnp.int32(num_groups), add_group, total)
