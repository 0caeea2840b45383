"""Auxiliary losses of the router. They are returned as sums over tokens, to be divided by the tokens of a whole step."""

import jax
import jax.numpy as jnp

from moejax.moe.router import Route


def balance_loss_sum(route: Route, valid_T: jax.Array, num_sequences: int) -> jax.Array:
    """Load-balancing loss of scope `sequence`, times the valid tokens of each sequence, summed.

    For one sequence L = N * sum_i f_i P_i with f_i = C_i / (K T) from requested counts (no gradient) and
    P_i the mean softmax score (report section 10.5, equation 30); balanced is 1. Because each sequence
    has its own histogram, neither the mesh nor the number of microbatches changes the value.
    """
    tokens, num_experts = route.score_TE.shape
    top_k = route.expert_TK.shape[-1]
    expert = route.expert_TK.reshape(num_sequences, -1)
    valid = valid_T.reshape(num_sequences, -1)
    score = jnp.where(valid[..., None], route.score_TE.reshape(num_sequences, -1, num_experts), 0.0)
    counts = jax.vmap(lambda e: jnp.bincount(e, length=num_experts + 1)[:num_experts])(expert)
    num_valid = jnp.maximum(jnp.sum(valid, axis=1), 1).astype(jnp.float32)[:, None]
    fraction = jax.lax.stop_gradient(counts.astype(jnp.float32) / (top_k * num_valid))
    return num_experts * jnp.sum(fraction * jnp.sum(score, axis=1))  # n_s * P_s is the sum of scores


def z_loss_sum(route: Route, valid_T: jax.Array) -> jax.Array:
    """Router z-loss: sum over valid tokens of logsumexp(logits)^2 (Zoph et al., 2022)."""
    return jnp.sum(jnp.where(valid_T, jnp.square(route.logsumexp_T), 0.0))
