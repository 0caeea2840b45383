"""Activations of feed-forward networks, by name."""

import jax
import jax.numpy as jnp

GATED = frozenset({"swiglu", "clamped_swiglu", "geglu"})
"""Activations with a gate: the first matmul makes gate and up."""

CLAMP_ALPHA, CLAMP_LIMIT = 1.702, 7.0
"""Steepness and limit of `clamped_swiglu`, as in gpt-oss."""


def num_inner(activation: str) -> int:
    """Matrices of the first matmul: gate and up, or up alone."""
    return 2 if activation in GATED else 1


def activate(hidden_RgF: jax.Array, activation: str) -> jax.Array:
    """[R, g, F] to [R, F]; g is `num_inner`, gate first.

    swiglu: silu(gate) * up. geglu: gelu(gate) * up, tanh form. clamped_swiglu: gate at most `CLAMP_LIMIT`, up
    within it on both sides, gate * sigmoid(CLAMP_ALPHA * gate) * (up + 1). relu2: max(up, 0)^2.
    """
    first, up = hidden_RgF[:, 0], hidden_RgF[:, -1]
    match activation:
        case "swiglu":
            return jax.nn.silu(first) * up
        case "geglu":
            return jax.nn.gelu(first, approximate=True) * up
        case "clamped_swiglu":
            gate = jnp.minimum(first, CLAMP_LIMIT)
            return gate * jax.nn.sigmoid(CLAMP_ALPHA * gate) * (jnp.clip(up, -CLAMP_LIMIT, CLAMP_LIMIT) + 1)
        case _:
            return jnp.square(jax.nn.relu(up))
