"""Grouped matmul for XLA:CPU: loops over windows of rows whose trip counts are data.

A group is cut into windows of the largest size and one for the rest, padded to the next of a few sizes: a weight
is read rarely, and every product is large. Windows of one size share a loop; each is written back under a mask of
its own rows, so that groups need no alignment, padding or copy. Work is that of the rows in use, whatever the
static buffer holds.
"""

from collections.abc import Callable
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

_LEAST = 16  # rows of the least window, which costs as much as about 20 more rows


class Window(NamedTuple):
    """`size` rows (static) from row `start`; those under the mask `mine` [size, 1] are of `group`."""

    size: int
    group: jax.Array
    start: jax.Array
    mine: jax.Array

    def rows(self, array: jax.Array) -> jax.Array:
        """The window's rows, other groups' too."""
        return lax.dynamic_slice_in_dim(array, self.start, self.size)


class Ranges(NamedTuple):
    """Ranges of rows, int32 [T] each: their group, first and one past the last row."""

    group: jax.Array
    begin: jax.Array
    end: jax.Array


def _sizes(num_rows: int, kernel: Kernel) -> list[int]:
    """Sizes of windows, ascending; the last one, of 256 rows by default, is as fast per row as a dense matmul."""
    least = kernel.tiles.rows if kernel.tiles else _LEAST
    return sorted({min(multiple * least, num_rows) for multiple in (1, 2, 3, 4, 6, 8, 12, 16)})


def _cut(group_sizes: jax.Array, num_rows: int, most: int) -> Ranges:
    """Groups cut into ranges of at most `most` rows."""
    start, end = bounds(group_sizes)
    per_group = -(-group_sizes // most)
    last = jnp.cumsum(per_group, dtype=jnp.int32)
    index = jnp.arange(num_rows // most + group_sizes.shape[0], dtype=jnp.int32)
    group = jnp.minimum(count_ends(index, last), group_sizes.shape[0] - 1)
    begin = start[group] + (index - (last - per_group)[group]) * most
    begin = jnp.where(index < last[-1], begin, end[group])
    return Ranges(group, begin, jnp.minimum(begin + most, end[group]))


def _fold(
    visit: Callable[[Window, jax.Array], jax.Array],
    carry: jax.Array,
    ranges: Ranges,
    num_rows: int,
    sizes: list[int],
) -> jax.Array:
    """Fold `visit` over a window for each of `ranges` that is not empty, in loops by size."""
    # One more that is empty: if there was one alone XLA would see that it is read in every turn, and hoist the work.
    ranges = Ranges(*(jnp.append(array, 0) for array in ranges))
    length = ranges.end - ranges.begin
    kind = count_ends(length - 1, jnp.array(sizes[:-1], jnp.int32))  # the least size that holds the range
    kind = jnp.where(length > 0, kind, len(sizes))
    stop = count_ends(jnp.arange(len(sizes), dtype=jnp.int32), kind)
    order = jnp.argsort(kind)
    group, begin, end = (array[order] for array in ranges)

    def loop(number: int, size: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            i, carry = state
            first = jnp.minimum(begin[i], num_rows - size)  # at the end of the buffer a window reaches back
            row = first + jnp.arange(size, dtype=jnp.int32)
            mine = ((row >= begin[i]) & (row < end[i]))[:, None]
            return i + 1, visit(Window(size, group[i], first, mine), carry)

        return lax.while_loop(lambda state: state[0] < stop[number], body, state)

    state = jnp.zeros_like(stop[0]), carry
    for number, size in enumerate(sizes):
        state = loop(number, size, state)
    return state[1]


def _widen(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if _WIDEN_BFLOAT16 else array


def gmm(call: Product, kernel: Kernel) -> jax.Array:
    """The product, [M, N]."""
    lhs, rhs, group_sizes, transpose_rhs, out_dtype = call
    num_rows, _, n, _ = call.sizes
    dims = (((1,), (1 if transpose_rhs else 0,)), ((), ()))
    lhs, rhs = _widen(lhs), _widen(rhs)

    def visit(window: Window, out: jax.Array) -> jax.Array:
        weight = lax.dynamic_index_in_dim(rhs, window.group, 0, keepdims=False)
        y = lax.dot_general(window.rows(lhs), weight, dims, preferred_element_type=jnp.float32)
        y = jnp.where(window.mine, y.astype(out_dtype), window.rows(out))
        return lax.dynamic_update_slice_in_dim(out, y, window.start, 0)

    out, sizes = vary(jnp.zeros((num_rows, n), out_dtype), call.axes), _sizes(num_rows, kernel)
    return _fold(visit, out, _cut(group_sizes, num_rows, sizes[-1]), num_rows, sizes)


def wgrad(call: WeightGradient, kernel: Kernel) -> jax.Array:
    """The weight gradient, [G, K, N]: each group's is summed in float32 and written once."""
    lhs, grad, group_sizes, out_dtype, accumulator = call
    num_rows, k, n, num_groups = call.sizes
    lhs, grad = _widen(lhs), _widen(grad)
    dims = (((0,), (0,)), ((), ()))
    sizes = _sizes(num_rows, kernel)
    start, end = bounds(group_sizes)
    whole = jnp.maximum(group_sizes - 1, 0) // sizes[-1]  # windows before the last one

    def visit(window: Window, total: jax.Array) -> jax.Array:
        x, dy = (jnp.where(window.mine, window.rows(array), 0) for array in (lhs, grad))
        product = lax.dot_general(x, dy, dims, preferred_element_type=jnp.float32)

        def add(i: jax.Array, product: jax.Array) -> jax.Array:
            row = start[window.group] + i * sizes[-1]
            x, dy = (lax.dynamic_slice_in_dim(array, row, sizes[-1]) for array in (lhs, grad))
            return product + lax.dot_general(x, dy, dims, preferred_element_type=jnp.float32)

        windows = whole[window.group]
        product = lax.fori_loop(jnp.zeros_like(windows), windows, add, product)
        if accumulator is not None:
            product += lax.dynamic_index_in_dim(total, window.group, 0, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, product.astype(total.dtype), window.group, 0)

    total = accumulator if accumulator is not None else vary(jnp.zeros((num_groups, k, n), out_dtype), call.axes)
    rests = Ranges(jnp.arange(num_groups, dtype=jnp.int32), start + whole * sizes[-1], end)
    return _fold(visit, total, rests, num_rows, sizes)
