"""One MoE layer on one device: route, plan, dispatch, experts, combine."""

import jax
import jax.numpy as jnp
from jax import named_scope

from moejax.config import Config
from moejax.moe.exchange import Exchange
from moejax.moe.experts import ExpertWeights, experts
from moejax.moe.router import RouterWeights, route
from moejax.moe.statistics import Statistics, collect


def moe_layer(
    x_BSD: jax.Array,
    inner_BSD: jax.Array,
    valid_BS: jax.Array,
    router: RouterWeights,
    weights: ExpertWeights,
    config: Config,
    exchange: Exchange,
) -> tuple[jax.Array, Statistics]:
    """Sum over a token's chosen experts of routing weight times expert result.

    Args:
        x_BSD: Normed hidden states of this device's sequences: what the router reads.
        inner_BSD: What the experts read: the same, or its projection in a latent MoE.
        valid_BS: Tokens that exist; padding is neither routed nor counted.
        router: Router weights.
        weights: Weights of the local experts.
        config: What the layer is (`model.moe`), how it runs (`moe`), what is counted (`loss`).
        exchange: How rows reach experts.
    """
    model, valid_T = config.model.moe, valid_BS.reshape(-1)
    with named_scope("route"):
        chosen = route(
            x_BSD.reshape(-1, x_BSD.shape[-1]), valid_T, router, model, config.moe.routing, config.moe.jitter
        )
    with named_scope("plan"):
        plan = exchange.plan(chosen.expert_TK, chosen.weight_TK)
        weight_TK = _kept_weights(chosen.weight_TK, plan.kept_TK, config.moe.renormalize_dropped)
    with named_scope("dispatch"):
        rows_RD, weight_R, plan = exchange.dispatch(inner_BSD.reshape(-1, inner_BSD.shape[-1]), weight_TK, plan)
    with named_scope("experts"):
        out_RD = experts(rows_RD, weight_R, plan.sizes_e, weights, model.activation, model.weight_on == "input")
    with named_scope("combine"):
        y_TD = exchange.combine(out_RD, plan)
    with named_scope("statistics"):
        statistics = collect(chosen, plan, valid_BS, config)
    return y_TD.reshape(inner_BSD.shape), statistics


def _kept_weights(weight_TK: jax.Array, kept_TK: jax.Array, renormalize: bool) -> jax.Array:
    """Weights of admitted routes; with `renormalize` they sum to what the weights of all routes summed to."""
    kept_weight_TK = jnp.where(kept_TK, weight_TK, 0.0)
    if not renormalize:
        return kept_weight_TK
    whole, left = (jnp.sum(w, axis=1, keepdims=True) for w in (weight_TK, kept_weight_TK))
    return kept_weight_TK * jnp.where(left > 0, whole / jnp.where(left > 0, left, 1.0), 1.0)
