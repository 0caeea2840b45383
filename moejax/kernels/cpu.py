"""Grouped matmul for XLA:CPU: loops over windows of rows whose trip counts are data.

A group is cut into whole windows and one for the rest, padded to the next of a few sizes. So a group's weight is
read once, its gradient written once, and every product is large. Groups with rests of one size share a loop; the
rest is written back under a row mask, so that groups need no alignment, padding or copy. Work is that of the
rows in use, whatever the static buffer holds.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels.groups import bounds
from moejax.kernels.kernel import Kernel
from moejax.kernels.operands import Product, WeightGradient
from moejax.varying import vary

# XLA:CPU before 0.11 multiplies small bfloat16 blocks slower than float32 ones, cast included; later ones do not.
_WIDEN_BFLOAT16 = jax.__version_info__ < (0, 11)

_LEAST = 16  # rows of the least window, which costs as much as about 20 more rows


class Group(NamedTuple):
    """A group that has rows: its number, whole windows, and first and one past the last row of its rest."""

    index: jax.Array
    whole: jax.Array
    begin: jax.Array
    end: jax.Array


def _sizes(num_rows: int, kernel: Kernel) -> list[int]:
    """Sizes of windows, ascending; the last one, of 256 rows by default, is as fast per row as a dense matmul."""
    least = kernel.tiles.rows if kernel.tiles else _LEAST
    return sorted({min(multiple * least, num_rows) for multiple in (1, 2, 3, 4, 6, 8, 12, 16)})


def _for_groups(
    group_sizes: jax.Array, sizes: list[int], visit: Callable[[int, Group, jax.Array], jax.Array], carry: jax.Array
) -> jax.Array:
    """Fold `visit` over the groups that have rows, given the size of the window for the rest (static)."""
    start, end = bounds(group_sizes)
    whole = jnp.maximum(group_sizes - 1, 0) // sizes[-1]
    begin = start + whole * sizes[-1]
    kind = jnp.sum((end - begin)[:, None] > jnp.array(sizes), axis=1, dtype=jnp.int32)
    kind = jnp.where(group_sizes > 0, kind, len(sizes))
    order = jnp.argsort(kind)
    stop = jnp.int32(0)
    for number, size in enumerate(sizes):
        first, stop = stop, stop + jnp.sum(kind == number, dtype=jnp.int32)

        def body(i: jax.Array, carry: jax.Array, size: int = size) -> jax.Array:
            g = order[i]
            return visit(size, Group(g, whole[g], begin[g], end[g]), carry)

        carry = lax.fori_loop(first, stop, body, carry)
    return carry


def _rest(size: int, group: Group, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """First row of the window for a group's rest, which reaches back where the buffer ends, and its own rows' mask."""
    start = jnp.minimum(group.begin, num_rows - size)
    row = start + jnp.arange(size, dtype=jnp.int32)
    return start, ((row >= group.begin) & (row < group.end))[:, None]


def _widen(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if _WIDEN_BFLOAT16 else array


def gmm(call: Product, kernel: Kernel) -> jax.Array:
    """The product, [M, N]."""
    lhs, rhs, group_sizes, transpose_rhs, out_dtype = call
    num_rows, _, n, _ = call.sizes
    dims = (((1,), (1 if transpose_rhs else 0,)), ((), ()))
    lhs, rhs = _widen(lhs), _widen(rhs)
    sizes = _sizes(num_rows, kernel)

    def visit(size: int, group: Group, out: jax.Array) -> jax.Array:
        weight = lax.dynamic_index_in_dim(rhs, group.index, 0, keepdims=False)

        def product(row: jax.Array, size: int) -> jax.Array:
            x = lax.dynamic_slice_in_dim(lhs, row, size)
            return lax.dot_general(x, weight, dims, preferred_element_type=jnp.float32).astype(out_dtype)

        def add_whole(i: jax.Array, out: jax.Array) -> jax.Array:
            row = group.begin - (i + 1) * sizes[-1]
            return lax.dynamic_update_slice_in_dim(out, product(row, sizes[-1]), row, 0)

        out = lax.fori_loop(jnp.zeros_like(group.whole), group.whole, add_whole, out)
        start, mine = _rest(size, group, num_rows)
        rest = jnp.where(mine, product(start, size), lax.dynamic_slice_in_dim(out, start, size))
        return lax.dynamic_update_slice_in_dim(out, rest, start, 0)

    return _for_groups(group_sizes, sizes, visit, vary(jnp.zeros((num_rows, n), out_dtype), call.axes))


def wgrad(call: WeightGradient, kernel: Kernel) -> jax.Array:
    """The weight gradient, [G, K, N]."""
    lhs, grad, group_sizes, out_dtype, accumulator = call
    num_rows, k, n, num_groups = call.sizes
    total = accumulator if accumulator is not None else vary(jnp.zeros((num_groups, k, n), out_dtype), call.axes)
    lhs, grad = _widen(lhs), _widen(grad)
    dims = (((0,), (0,)), ((), ()))
    sizes = _sizes(num_rows, kernel)

    def visit(size: int, group: Group, total: jax.Array) -> jax.Array:
        start, mine = _rest(size, group, num_rows)
        x, dy = (jnp.where(mine, lax.dynamic_slice_in_dim(rows, start, size), 0) for rows in (lhs, grad))
        product = lax.dot_general(x, dy, dims, preferred_element_type=jnp.float32)

        def add_whole(i: jax.Array, product: jax.Array) -> jax.Array:
            row = group.begin - (i + 1) * sizes[-1]
            x, dy = (lax.dynamic_slice_in_dim(rows, row, sizes[-1]) for rows in (lhs, grad))
            return product + lax.dot_general(x, dy, dims, preferred_element_type=jnp.float32)

        product = lax.fori_loop(jnp.zeros_like(group.whole), group.whole, add_whole, product)
        if accumulator is not None:
            product += lax.dynamic_index_in_dim(total, group.index, 0, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, product.astype(total.dtype), group.index, 0)

    return _for_groups(group_sizes, sizes, visit, total)
