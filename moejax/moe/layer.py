"""One MoE layer on one device: route, plan, dispatch, experts, combine."""

import jax
import jax.numpy as jnp
from jax import named_scope

from moejax.config import MoEModelConfig
from moejax.moe.balance import balance_loss_sum, z_loss_sum
from moejax.moe.exchange import Exchange
from moejax.moe.experts import experts
from moejax.moe.router import route
from moejax.moe.statistics import Statistics, count_routes


def moe_layer(
    x_BSD: jax.Array,
    valid_BS: jax.Array,
    router_DE: jax.Array,
    gate_up_eD2F: jax.Array,
    down_eFD: jax.Array,
    config: MoEModelConfig,
    exchange: Exchange,
) -> tuple[jax.Array, Statistics]:
    """Sum over a token's chosen experts of weight times expert output.

    Args:
        x_BSD: Normed hidden states of this device's sequences.
        valid_BS: Tokens that exist; padding is neither routed nor counted.
        router_DE: Router weights, float32.
        gate_up_eD2F: Gate and up weights of the local experts.
        down_eFD: Down weights of the local experts.
        config: Number of experts, choices, normalisation.
        exchange: How rows reach experts.
    """
    x_TD, valid_T = x_BSD.reshape(-1, x_BSD.shape[-1]), valid_BS.reshape(-1)
    with named_scope("route"):
        chosen = route(x_TD, router_DE, valid_T, config)
    with named_scope("plan"):
        plan = exchange.plan(chosen.expert_TK)
    with named_scope("dispatch"):
        rows_RD = exchange.dispatch(x_TD, plan)
    with named_scope("experts"):
        out_RD = experts(rows_RD, plan.sizes_e, gate_up_eD2F, down_eFD)
    with named_scope("combine"):
        out_TKD = exchange.combine(out_RD, plan)
        weight_TK = jnp.where(plan.kept_TK, chosen.weight_TK, 0.0)
        y_TD = jnp.einsum("tkd,tk->td", out_TKD, weight_TK.astype(x_TD.dtype), preferred_element_type=jnp.float32)
    requested_E, dropped = count_routes(chosen, plan.kept_TK, config.num_experts)
    statistics = Statistics(
        requested_E, dropped, balance_loss_sum(chosen, valid_T, x_BSD.shape[0]), z_loss_sum(chosen, valid_T)
    )
    return y_TD.astype(x_BSD.dtype).reshape(x_BSD.shape), statistics
