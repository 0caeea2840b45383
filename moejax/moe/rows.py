"""Moving rows by index, with a gradient that gathers too.

The transpose of a gather is a scatter-add, which is slow and, on GPUs, adds in changing order. Where
each input row is used is known here, so the gradient is a gather and a sum as well.
"""

import jax
import jax.numpy as jnp

from moejax.varying import vary, varying_axes


def _take(x_ID: jax.Array, index: jax.Array) -> jax.Array:
    rows = jnp.take(x_ID, jnp.maximum(index, 0), axis=0, mode="clip")
    return jnp.where((index >= 0)[..., None], rows, 0)


@jax.custom_vjp
def _take_rows(x_ID: jax.Array, index_O: jax.Array, users_IN: jax.Array) -> jax.Array:
    return _take(x_ID, index_O)


def _forward(x_ID: jax.Array, index_O: jax.Array, users_IN: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _take(x_ID, index_O), users_IN


def _backward(users_IN: jax.Array, dout_OD: jax.Array) -> tuple[jax.Array, None, None]:
    picked_IND = _take(dout_OD, users_IN)
    return jnp.sum(picked_IND, axis=1, dtype=jnp.float32).astype(dout_OD.dtype), None, None


_take_rows.defvjp(_forward, _backward)


def take_rows(x_ID: jax.Array, index_O: jax.Array, users_IN: jax.Array) -> jax.Array:
    """Rows `x[index]`, zero where the index is negative.

    Args:
        x_ID: I rows.
        index_O: For each of O output rows, the input row, or negative for a zero row.
        users_IN: The inverse: for each input row, the output rows that take it, at most N, padded
            with negatives. It must list each use exactly once.
    """
    axes = varying_axes(x_ID, index_O, users_IN)
    return _take_rows(*vary((x_ID, index_O, users_IN), axes))
