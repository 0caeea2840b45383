"""Several arrays as one: what goes the same way crosses in one collective, bit by bit.

A row, the routing weights of its routes and the rows that they belong to have different types; as unsigned
integers they lie side by side, and no conversion on the way can touch a bit.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels import MXArray, dequantize, quantize

Wire = Literal["mxfp8"] | None
"""Form of the first of several arrays, the rows, on their way; None for as they are."""


def join(arrays: Sequence[jax.Array]) -> jax.Array:
    """Arrays [W, ...] of 1-, 2- or 4-byte numbers as one array [W, C] of unsigned integers."""
    unit = min(array.dtype.itemsize for array in arrays)
    bits = [lax.bitcast_convert_type(array, f"uint{8 * unit}") for array in arrays]
    return jnp.concatenate([part.reshape(part.shape[0], -1) for part in bits], axis=1)


def split(payload: jax.Array, like: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The arrays of a payload of any number of rows; `like` are those that were joined."""
    unit, start, found = payload.dtype.itemsize, 0, []
    for array in like:
        ratio = array.dtype.itemsize // unit
        stop = start + array[0].size * ratio
        shape = (payload.shape[0], *array.shape[1:]) + ((ratio,) if ratio > 1 else ())
        found.append(lax.bitcast_convert_type(payload[:, start:stop].reshape(shape), array.dtype))
        start = stop
    return tuple(found)


def encode(arrays: Sequence[jax.Array], wire: Wire) -> Sequence[jax.Array]:
    """What crosses instead of `arrays`: with `mxfp8`, values and scales of the rows [W, D], and the rest."""
    if wire is None:
        return arrays
    rows = quantize(arrays[0])
    return rows.values, rows.scales, *arrays[1:]


def _decode(carried: tuple[jax.Array, ...], like: Sequence[jax.Array], wire: Wire) -> tuple[jax.Array, ...]:
    if wire is None:
        return carried
    values, scales, *rest = carried
    return dequantize(MXArray(values, scales), like[0].dtype), *rest


def carry(
    arrays: Sequence[jax.Array], collective: Callable[[jax.Array], jax.Array], wire: Wire = None
) -> tuple[jax.Array, ...]:
    """`collective` of all arrays at once."""
    parts = encode(arrays, wire)
    carried = split(collective(join(parts)), parts) if len(parts) > 1 else (collective(parts[0]),)
    return _decode(carried, arrays, wire)


def carry_gradients(
    gradients: Sequence[jax.Array], collective: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array | None, ...]:
    """`collective` of the gradients there are; integers have none."""
    real = [gradient for gradient in gradients if gradient.dtype != jax.dtypes.float0]
    carried = iter(carry(real, collective))
    return tuple(next(carried) if gradient.dtype != jax.dtypes.float0 else None for gradient in gradients)
