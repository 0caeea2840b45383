"""What a layer reports, and the metrics made from it. Requested and kept routes are two counts, never one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.axes import TOKEN_AXES
from moejax.config import Config
from moejax.moe.balance import count_experts, sequence_sum, z_loss_sum
from moejax.moe.exchange.interface import Plan
from moejax.moe.router import Route


class Statistics(NamedTuple):
    """Of one layer on one device, over one microbatch; sums, so they add up over devices and microbatches.

    Attributes:
        requested_E: Routes asked for, per expert, int32.
        kept_E: Routes that got a place, per expert, int32.
        score_E: Sum over tokens of scores that sum to one, float32; has a gradient.
        balance_sum: Balance loss times tokens, float32; has a gradient. The layer knows the sequence scopes; for
            the others `moejax.moe.balance.balance_sum` makes it from counts and scores.
        z_sum: Router z-loss summed over tokens, float32; has a gradient.
        lost_one: Tokens that lost a route, int32.
        lost_all: Tokens that lost all routes, int32.
        weight_sum: Routing weight asked for, float32.
        removed_sum: Routing weight of dropped routes, float32.
        margin_sum: What is ranked, of the last chosen over the first not chosen, summed over tokens, float32.
        sent: Rows that devices sent to others in dispatch, int32; combine sends as many.
        saved: Rows that they would have sent in addition without de-duplication, int32.
    """

    requested_E: jax.Array
    kept_E: jax.Array
    score_E: jax.Array
    balance_sum: jax.Array
    z_sum: jax.Array
    lost_one: jax.Array
    lost_all: jax.Array
    weight_sum: jax.Array
    removed_sum: jax.Array
    margin_sum: jax.Array
    sent: jax.Array
    saved: jax.Array


def collect(route: Route, plan: Plan, valid_BS: jax.Array, config: Config) -> Statistics:
    """Statistics of one layer; `route.weight_TK` are the weights before admission."""
    num_experts, scope = route.score_TE.shape[1], config.loss.balance_scope
    sharded = config.mesh.context > 1 and scope.startswith("sequence")
    routed_TK, valid_T = route.expert_TK < num_experts, valid_BS.reshape(-1)
    lost_TK = routed_TK & ~plan.kept_TK
    kept_expert_TK = jnp.where(plan.kept_TK, route.expert_TK, num_experts)
    weight_TK = lax.stop_gradient(route.weight_TK)
    margin_T = lax.stop_gradient(route.margin_T)
    return Statistics(
        requested_E=count_experts(route.expert_TK, num_experts),
        kept_E=count_experts(kept_expert_TK, num_experts),
        score_E=jnp.sum(jnp.where(valid_T[:, None], route.score_TE, 0.0), axis=0),
        balance_sum=sequence_sum(route, valid_BS, scope == "sequence_unbiased", sharded),
        z_sum=z_loss_sum(route, valid_T),
        lost_one=jnp.sum(jnp.any(lost_TK, axis=1), dtype=jnp.int32),
        lost_all=jnp.sum(jnp.any(lost_TK, axis=1) & ~jnp.any(plan.kept_TK, axis=1), dtype=jnp.int32),
        weight_sum=jnp.sum(weight_TK),
        removed_sum=jnp.sum(jnp.where(lost_TK, weight_TK, 0.0)),
        margin_sum=jnp.sum(margin_T),
        sent=plan.sent,
        saved=plan.saved,
    )


def max_over_mean(counts: jax.Array) -> jax.Array:
    """Largest over mean of the last dim (report, equation 22); 1 when balanced, 0 when there is nothing."""
    counts = counts.astype(jnp.float32)
    return jnp.max(counts, axis=-1) / jnp.maximum(jnp.mean(counts, axis=-1), 1e-9)


def entropy_imbalance(counts: jax.Array) -> jax.Array:
    """I_H = 1 - H / log n of the last dim: 0 when balanced, 1 when one has everything."""
    share = counts / jnp.maximum(jnp.sum(counts, axis=-1, keepdims=True), 1)
    entropy = -jnp.sum(jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1.0)), 0.0), axis=-1)
    return 1 - entropy / jnp.log(jnp.float32(max(counts.shape[-1], 2)))


def summarize(
    total: Statistics, num_tokens: jax.Array, ranks: int, row_bytes: int, drops: bool
) -> dict[str, jax.Array]:
    """Metrics of a whole step from sums over all devices and microbatches, stacked over layers [L, ...].

    Args:
        total: The sums.
        num_tokens: Tokens of the step.
        ranks: Ranks that experts are sharded over.
        row_bytes: Bytes of one row on the wire, there and back.
        drops: Routes may lack a place.

    Returns:
        Of the worst layer: `moe/{requested,kept}[_rank]_max_over_mean`, `moe/entropy_imbalance` (of requests). Of
        all layers together: `moe/dropped_fraction` of routes, `moe/tokens_losing_{one,all}` as fractions,
        `moe/weight_removed` as a fraction, `moe/margin` (mean), `moe/dead_experts` (number that no token asked
        for), `moe/bytes_{sent,saved}` between devices by dispatch and combine of the forward pass. And
        `moe/requested` [L, E], routes; with `drops` also `moe/kept` [L, E].
    """
    requested, kept = total.requested_E, total.kept_E
    by_rank = [a.reshape(a.shape[0], ranks, -1).sum(-1) for a in (requested, kept)]
    routes = jnp.maximum(jnp.sum(requested), 1).astype(jnp.float32)
    tokens = jnp.maximum(num_tokens, 1).astype(jnp.float32) * requested.shape[0]
    rows = {name: jnp.sum(getattr(total, name).astype(jnp.float32)) for name in ("sent", "saved")}
    return {
        "moe/requested_max_over_mean": jnp.max(max_over_mean(requested)),
        "moe/kept_max_over_mean": jnp.max(max_over_mean(kept)),
        "moe/requested_rank_max_over_mean": jnp.max(max_over_mean(by_rank[0])),
        "moe/kept_rank_max_over_mean": jnp.max(max_over_mean(by_rank[1])),
        "moe/entropy_imbalance": jnp.max(entropy_imbalance(requested)),
        "moe/dropped_fraction": jnp.sum(requested - kept).astype(jnp.float32) / routes,
        "moe/tokens_losing_one": jnp.sum(total.lost_one).astype(jnp.float32) / tokens,
        "moe/tokens_losing_all": jnp.sum(total.lost_all).astype(jnp.float32) / tokens,
        "moe/weight_removed": jnp.sum(total.removed_sum) / jnp.maximum(jnp.sum(total.weight_sum), 1e-9),
        "moe/margin": jnp.sum(total.margin_sum) / tokens,
        "moe/dead_experts": jnp.sum(requested == 0).astype(jnp.int32),
        **{f"moe/bytes_{name}": float(row_bytes) * value for name, value in rows.items()},
        "moe/requested": requested,
        **({"moe/kept": kept} if drops else {}),
    }


def pair_matrix(requested_LE: jax.Array, ranks: int, axes: tuple[str, ...]) -> jax.Array:
    """Requested routes from each source rank to each destination rank [L, S, P], on demand: one sum over devices.

    Args:
        requested_LE: Requested routes of this device alone.
        ranks: Ranks that experts are sharded over.
        axes: Mesh axes of these ranks. Devices at the same place along them are one source.
    """
    mine_LP = requested_LE.reshape(requested_LE.shape[0], ranks, -1).sum(-1)
    me_S = (jnp.arange(ranks) == lax.axis_index(axes)).astype(jnp.int32)
    return lax.psum(mine_LP[:, None, :] * me_S[:, None], TOKEN_AXES)
