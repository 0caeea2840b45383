"""Moving rows by index, with gradients that gather too.

The transpose of a gather is a scatter-add, which is slow and, on GPUs, adds in changing order. Where
each row is used is known here, so the gradient is a gather and a sum as well: `take_rows` and `sum_rows`
are each other's transpose. A negative index stands for no row.
"""

import jax
import jax.numpy as jnp

from moejax.varying import vary, varying_axes

UNWRITTEN = 0.0
"""What rows hold that belong to nobody. Nothing may depend on it: tests put NaN here."""


def _take(x_ID: jax.Array, index: jax.Array, fill: float) -> jax.Array:
    rows = jnp.take(x_ID, jnp.maximum(index, 0), axis=0, mode="clip")
    return jnp.where((index >= 0).reshape(*index.shape, *[1] * (x_ID.ndim - 1)), rows, jnp.asarray(fill, x_ID.dtype))


def _sum(x_ID: jax.Array, index_ON: jax.Array) -> jax.Array:
    if index_ON.shape[1] == 1:
        return _take(x_ID, index_ON[:, 0], 0.0)
    total = sum(_take(x_ID, index_ON[:, n], 0.0).astype(jnp.float32) for n in range(index_ON.shape[1]))
    return jnp.asarray(total).astype(x_ID.dtype)


@jax.custom_vjp
def _take_rows(x_ID: jax.Array, index_O: jax.Array, users_IN: jax.Array) -> jax.Array:
    return _take(x_ID, index_O, UNWRITTEN)


def _take_forward(x_ID: jax.Array, index_O: jax.Array, users_IN: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _take(x_ID, index_O, UNWRITTEN), users_IN


def _take_backward(users_IN: jax.Array, dout_OD: jax.Array) -> tuple[jax.Array, None, None]:
    return _sum(dout_OD, users_IN), None, None


_take_rows.defvjp(_take_forward, _take_backward)


@jax.custom_vjp
def _sum_rows(x_ID: jax.Array, index_ON: jax.Array, user_I: jax.Array) -> jax.Array:
    return _sum(x_ID, index_ON)


def _sum_forward(x_ID: jax.Array, index_ON: jax.Array, user_I: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _sum(x_ID, index_ON), user_I


def _sum_backward(user_I: jax.Array, dout_OD: jax.Array) -> tuple[jax.Array, None, None]:
    return _take(dout_OD, user_I, UNWRITTEN), None, None


_sum_rows.defvjp(_sum_forward, _sum_backward)


def take_rows(x_ID: jax.Array, index_O: jax.Array, users_IN: jax.Array) -> jax.Array:
    """Rows `x[index]`; `UNWRITTEN` where the index is negative.

    Args:
        x_ID: I rows; any number of dims after the first.
        index_O: For each of O output rows, the input row.
        users_IN: The inverse: for each input row, the output rows that take it, at most N, each once.
    """
    return _take_rows(*vary((x_ID, index_O, users_IN), varying_axes(x_ID, index_O, users_IN)))


def sum_rows(x_ID: jax.Array, index_ON: jax.Array, user_I: jax.Array) -> jax.Array:
    """Sum over n of rows `x[index[:, n]]`, in float32; rows without any index are exactly zero.

    Args:
        x_ID: I rows.
        index_ON: For each of O output rows, at most N input rows; no input row twice.
        user_I: The inverse: the output row that each input row goes into.
    """
    return _sum_rows(*vary((x_ID, index_ON, user_I), varying_axes(x_ID, index_ON, user_I)))


def inverse(index: jax.Array, size: int) -> jax.Array:
    """For each of `size` values, the flat place where `index` holds it, or -1. No value may occur twice."""
    flat = index.reshape(-1)
    places = jnp.arange(flat.size, dtype=jnp.int32)
    empty = vary(jnp.full(size, -1, jnp.int32), varying_axes(index))
    return empty.at[jnp.where(flat >= 0, flat, size)].set(places, mode="drop", unique_indices=False)
