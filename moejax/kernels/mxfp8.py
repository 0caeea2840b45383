"""MXFP8: E4M3 values with one power-of-two scale (E8M0) per 32 of them along the contraction.

The format is that of the OCP Microscaling specification 1.0. Scale exponents come from the bits of the block's
largest magnitude, so results are the same on every platform.

Defined corners: magnitudes below 2**-126 (subnormal in float32) count as zero, in both directions; a block of
zeros has scale 2**-127; a block that holds a NaN or an infinity has the NaN scale and is NaN as a whole; a value
beyond 448 times its scale saturates, which happens with `floor` alone.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

BLOCK = 32
"""Values that share a scale."""

LARGEST = 448.0
"""Largest finite E4M3 value, 1.75 * 2**8."""

ScaleMode = Literal["round_ceiling", "floor"]
"""`round_ceiling`: the least power of two at which nothing saturates. `floor`: floor(log2(max)) - 8, as in the
specification, which clips blocks whose largest magnitude lies between 448 and 512 times the scale."""

_TINY = 2.0**-126
_NAN_SCALE = 255


@partial(jax.tree_util.register_dataclass, data_fields=("values", "scales"), meta_fields=("axis",))
@dataclass(frozen=True)
class MXArray:
    """A tensor in MXFP8; values and scales travel as one pytree.

    Attributes:
        values: float8_e4m3fn, of the tensor's shape.
        scales: Biased exponents, uint8 (the bits of E8M0): 2**(scale - 127), 255 for NaN; the tensor's shape with
            `axis` divided by 32. Bytes rather than float8_e8m0fnu, so that every collective moves them.
        axis: Dim along which blocks lie, negative, so that it survives stacking.
    """

    values: jax.Array
    scales: jax.Array
    axis: int = -1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.values.shape


def _blocked(array: jax.Array, axis: int) -> jax.Array:
    """Split `axis` (negative) into blocks: [..., n, ...] -> [..., n / 32, 32, ...]."""
    at = array.ndim + axis
    return array.reshape(*array.shape[:at], array.shape[at] // BLOCK, BLOCK, *array.shape[at + 1 :])


def _power_of_two(biased: jax.Array) -> jax.Array:
    """2**(biased - 127) in float32, for 1 <= biased <= 254."""
    return lax.bitcast_convert_type(biased.astype(jnp.uint32) << 23, jnp.float32)


def _scale_bytes(blocks: jax.Array, axis: int, mode: ScaleMode) -> jax.Array:
    """Biased exponent of the scale of float32 blocks along `axis`, int32, with `axis` kept."""
    # magnitudes compare as integers do, NaN above infinity; a float maximum may lose a NaN on XLA:CPU
    bits = jnp.max(lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32), axis=axis, keepdims=True)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    scale = exponent - 8
    if mode == "round_ceiling":
        scale = jnp.where(mantissa > 0x600000, exponent - 7, scale)  # beyond 1.75 * 2**exponent, that is 448 * 2**scale
    return jnp.where(exponent == 255, _NAN_SCALE, jnp.maximum(scale, 0))


def quantize(array: jax.Array | np.ndarray, *, axis: int = -1, mode: ScaleMode = "round_ceiling") -> MXArray:
    """Round a float32 or bfloat16 tensor to MXFP8 with blocks along `axis`.

    Values round to nearest, ties to even. Raises ValueError if `axis` is no multiple of 32 long.
    """
    axis = axis if axis < 0 else axis - array.ndim
    if array.shape[axis] % BLOCK:
        raise ValueError(f"mxfp8: dim {axis} of shape {array.shape} must be a multiple of {BLOCK}")
    blocks = _blocked(jnp.asarray(array, jnp.float32), axis)
    blocks = jnp.where(jnp.abs(blocks) < _TINY, 0.0, blocks)
    scale = _scale_bytes(blocks, axis, mode)
    scaled = blocks * _power_of_two(jnp.clip(254 - scale, 1, 254))
    scaled = jnp.where(scale == _NAN_SCALE, jnp.nan, jnp.clip(scaled, -LARGEST, LARGEST))
    values = scaled.astype(jnp.float8_e4m3fn).reshape(array.shape)
    return MXArray(values, jnp.squeeze(scale, axis).astype(jnp.uint8), axis)


def dequantize(array: MXArray, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
    """The tensor that `array` stands for.

    Exact in float32 and in bfloat16, since E4M3 has four significant bits; 2**128 itself becomes infinite.
    """
    scale = jnp.expand_dims(array.scales.astype(jnp.int32), array.axis)
    blocks = _blocked(array.values.astype(jnp.float32), array.axis)
    # in two factors, because the least scales are subnormal
    scaled = blocks * _power_of_two(jnp.clip(scale + 64, 1, 254)) * jnp.float32(2.0**-64)
    high = blocks * _power_of_two(jnp.clip(scale, 1, 254))
    out = jnp.where(scale < 128, scaled, high)
    out = jnp.where(jnp.abs(out) < _TINY, 0.0, out)
    return jnp.where(scale == _NAN_SCALE, jnp.nan, out).reshape(array.shape).astype(dtype)
