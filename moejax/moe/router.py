"""The router: which experts a token goes to, and with what weight."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.config import MoEModelConfig


class Route(NamedTuple):
    """A routing decision, float32 and int32.

    Attributes:
        expert_TK: Chosen experts, best first; `num_experts` (no expert) for tokens that are not valid.
        weight_TK: Weight of each choice in the output; zero for tokens that are not valid.
        score_TE: Softmax over all experts.
        logsumexp_T: Log of the softmax's denominator, for the z-loss.
    """

    expert_TK: jax.Array
    weight_TK: jax.Array
    score_TE: jax.Array
    logsumexp_T: jax.Array


def route(x_TD: jax.Array, router_DE: jax.Array, valid_T: jax.Array, config: MoEModelConfig) -> Route:
    """Top-K of a float32 softmax. Ties go to the lower expert; padding is never routed."""
    logits_TE = jnp.dot(x_TD.astype(jnp.float32), router_DE.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    logits_TE = jnp.where(valid_T[:, None], logits_TE, 0.0)
    logsumexp_T = jax.nn.logsumexp(logits_TE, axis=-1)
    score_TE = jnp.exp(logits_TE - logsumexp_T[:, None])
    _, expert_TK = jax.lax.top_k(jax.lax.stop_gradient(score_TE), config.top_k)
    weight_TK = jnp.take_along_axis(score_TE, expert_TK, axis=-1)
    if config.renormalize:
        weight_TK = weight_TK / jnp.sum(weight_TK, axis=-1, keepdims=True)
    weight_TK = jnp.where(valid_T[:, None], weight_TK, 0.0)
    expert_TK = jnp.where(valid_T[:, None], expert_TK, config.num_experts).astype(jnp.int32)
    return Route(expert_TK, weight_TK, score_TE, logsumexp_T)
