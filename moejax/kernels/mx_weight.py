"""A weight in MXFP8: the two orientations that training reads, and the place of its gradient.

Quantised values have no gradient of their own; it goes straight through to the weight that was quantised, which
is kept as `sink` for that alone. Nothing reads it, so a compiled program does not hold it.
"""

import functools
from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import Any

import jax
from jax import lax

from moejax.kernels.mxfp8 import MXArray, ScaleMode, quantize


@functools.partial(jax.tree_util.register_dataclass, data_fields=("sink", "forward", "backward"), meta_fields=("mode",))
@dataclass(frozen=True)
class MXWeight:
    """A weight [..., *K, *N] for products with rows [M, K]; leading dims are layers or groups. A pytree.

    Attributes:
        sink: The weight itself, never read: gives the gradient its place, shape and type.
        forward: [..., K, N] with blocks along K, which the forward product contracts.
        backward: The same with blocks along N, which the product for the gradient of the rows contracts.
        mode: Scale mode, also of the rows and gradients that are multiplied with the weight.
    """

    sink: jax.Array
    forward: MXArray
    backward: MXArray
    mode: ScaleMode = "round_ceiling"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.sink.shape

    def __getitem__(self, index: EllipsisType) -> "MXWeight":
        """`weight[...]` is the weight, as for an array."""
        assert index is ..., "an MXWeight has no parts"
        return self


def quantize_weight(weight: jax.Array, rows: int = 1, cols: int = 1, mode: ScaleMode = "round_ceiling") -> MXWeight:
    """Both orientations, 2 * 33 / 32 bytes a value.

    Args:
        weight: float32 or bfloat16 [..., *K, *N].
        rows: Number of dims of K, whose product must be a multiple of 32.
        cols: Number of dims of N, likewise.
        mode: Scale mode.
    """
    shape, at = weight.shape, weight.ndim - rows - cols
    matrix = lax.stop_gradient(weight).reshape(*shape[:at], prod(shape[at : at + rows]), prod(shape[at + rows :]))
    return MXWeight(weight, quantize(matrix, axis=-2, mode=mode), quantize(matrix, axis=-1, mode=mode), mode)


def _is_weight(x: object) -> bool:
    return isinstance(x, MXWeight)


def split_constants(tree: Any) -> tuple[Any, Any]:
    """`tree` with sinks for its `MXWeight`s, which is what can be differentiated, and what is left, for `merge`."""
    floats = jax.tree.map(lambda w: w.sink if _is_weight(w) else w, tree, is_leaf=_is_weight)
    rest = jax.tree.map(
        lambda w: MXWeight(None, w.forward, w.backward, w.mode) if _is_weight(w) else None,  # type: ignore[arg-type]
        tree,
        is_leaf=_is_weight,
    )
    return floats, rest


def merge(differentiable: Any, constants: Any) -> Any:
    """The tree that `split_constants` took apart; `differentiable` may hold other arrays of the same shapes."""

    def one(array: Any, rest: MXWeight | None) -> Any:
        return array if rest is None else MXWeight(array, rest.forward, rest.backward, rest.mode)

    return jax.tree.map(one, differentiable, constants)
