"""Activations of feed-forward networks, by name."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

CLAMP_ALPHA, CLAMP_LIMIT = 1.702, 7.0
"""Steepness and limit of `clamped_swiglu`, as in gpt-oss."""


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate, approximate=True) * up


def _clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate = jnp.minimum(gate, CLAMP_LIMIT)
    return gate * jax.nn.sigmoid(CLAMP_ALPHA * gate) * (jnp.clip(up, -CLAMP_LIMIT, CLAMP_LIMIT) + 1)


def _relu2(gate: jax.Array, up: jax.Array) -> jax.Array:
    del gate
    return jnp.square(jax.nn.relu(up))


ACTIVATIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "swiglu": _swiglu,
    "clamped_swiglu": _clamped_swiglu,
    "geglu": _geglu,
    "relu2": _relu2,
}
"""Elementwise functions of gate and up; zeros give zero.

swiglu: silu(gate) * up. geglu: gelu(gate) * up, tanh form. clamped_swiglu: gate at most `CLAMP_LIMIT`, up within it
on both sides, gate * sigmoid(CLAMP_ALPHA * gate) * (up + 1). relu2: max(up, 0)^2, without gate.
"""

GATED = frozenset(ACTIVATIONS) - {"relu2"}
"""Activations with a gate: the first matmul makes gate and up."""


def num_inner(activation: str) -> int:
    """Matrices of the first matmul: gate and up, or up alone."""
    return 2 if activation in GATED else 1


def activate(hidden_RgF: jax.Array, activation: str) -> jax.Array:
    """[R, g, F] to [R, F]; g is `num_inner`, gate first."""
    return ACTIVATIONS[activation](hidden_RgF[:, 0], hidden_RgF[:, -1])
