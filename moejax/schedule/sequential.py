"""Sequential accumulation: one microbatch after the other, gradients added up in float32 on each device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moejax.axes import TOKEN_AXES
from moejax.kernels import merge, split_constants
from moejax.varying import vary, varying_axes

Loss = Callable[[Any, dict[str, jax.Array], Any], tuple[jax.Array, Any]]
"""(weights, microbatch, sums of the microbatches before) to this device's share of the loss, and sums to add up."""


def accumulate(loss_fn: Loss, weights: Any, microbatches: dict[str, jax.Array]) -> tuple[Any, Any]:
    """Gradients and auxiliary sums over all microbatches, without any collective of its own.

    Args:
        loss_fn: Differentiated in its first argument.
        weights: What the loss reads; the gradients have its structure, in float32, with an array for each `MXWeight`.
        microbatches: Arrays [M, ...].
    """

    def add(total: jax.Array, part: jax.Array) -> jax.Array:
        return total + part.astype(total.dtype)

    def one(carry: Any, microbatch: dict[str, jax.Array]) -> tuple[Any, None]:
        def loss(floats: Any) -> tuple[jax.Array, Any]:
            return loss_fn(merge(floats, constants), microbatch, carry[1])

        (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(floats)
        return jax.tree.map(add, carry, (grads, sums)), None

    floats, constants = split_constants(weights)
    zeros = jax.tree.map(lambda w: vary(jnp.zeros(w.shape, jnp.float32), varying_axes(w)), floats)
    first = jax.tree.map(lambda a: a[0], microbatches)
    sums_type = jax.eval_shape(lambda w, m: loss_fn(w, m, None)[1], weights, first)
    sums = jax.tree.map(lambda s: vary(jnp.zeros(s.shape, s.dtype), TOKEN_AXES), sums_type)
    (grads, sums), _ = jax.lax.scan(one, (zeros, sums), microbatches)
    return grads, sums
