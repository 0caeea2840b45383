"""Exchange `gather`: every rank gets all tokens, computes its experts, and results are reduce-scattered.

Two collectives that every machine does well, at D x T x (ranks - 1) sent each way whatever K is: best for few
ranks or tiny batches. A token reaches a rank once by construction.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.moe.admission import Capacity, admit_all, sort_routes
from moejax.moe.exchange.interface import Plan, place
from moejax.moe.rows import inverse, sum_rows, take_rows


@dataclass(frozen=True)
class Gather:
    """all_gather and psum_scatter over `axes`.

    Attributes:
        num_experts: Experts E over all ranks.
        ranks: Devices along those axes together.
        axes: Mesh axes of the experts, outermost first.
        capacity: Budget of each destination rank: factor x K x T.
    """

    num_experts: int
    ranks: int
    axes: tuple[str, ...]
    capacity: Capacity

    def plan(self, expert_TK: jax.Array, weight_TK: jax.Array) -> Plan:
        """Rows of all tokens' routes to this rank."""
        tokens, top_k = expert_TK.shape
        local = self.num_experts // self.ranks
        budget = self.capacity.rows(tokens * top_k, self.ranks * tokens * min(top_k, local), local)
        by_expert = sort_routes(expert_TK, weight_TK, self.num_experts, self.capacity.by_weight)
        kept_SE = admit_all(by_expert, self.axes, self.ranks, budget, self.capacity)
        me = lax.axis_index(self.axes)
        places = place(expert_TK, by_expert, kept_SE, me, self.ranks)
        rank_row = lax.all_gather(jnp.stack([places.rank_TK, places.row_TK]), self.axes, axis=1, tiled=True)
        row_AK = jnp.where(rank_row[0] == me, rank_row[1], -1)
        maps = {"row_AK": row_AK, "route_R": inverse(row_AK, budget)}
        sizes_e = jnp.sum(kept_SE.reshape(-1, self.ranks, local)[:, me], axis=0)
        return Plan(places.kept_TK, sizes_e, jnp.int32((self.ranks - 1) * tokens), jnp.int32(0), maps).named()

    def _gather(self, rows_TX: jax.Array) -> jax.Array:
        return checkpoint_name(lax.all_gather(rows_TX, self.axes, axis=0, tiled=True), "exchange")

    def dispatch(self, x_TD: jax.Array, weight_TK: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array, Plan]:
        """Gather all tokens, take those of the local experts."""
        row_AK, route_R = plan.maps["row_AK"], plan.maps["route_R"]
        rows_RD = take_rows(self._gather(x_TD), _token(route_R, row_AK), row_AK)
        weight_R = take_rows(self._gather(weight_TK).reshape(-1), route_R, row_AK.reshape(-1, 1))
        return rows_RD, weight_R, plan

    def combine(self, rows_RD: jax.Array, plan: Plan) -> jax.Array:
        """Add up each token's results here, then over ranks."""
        row_AK, route_R = plan.maps["row_AK"], plan.maps["route_R"]
        y_AD = sum_rows(rows_RD, row_AK, _token(route_R, row_AK))
        return checkpoint_name(lax.psum_scatter(y_AD, self.axes, scatter_dimension=0, tiled=True), "exchange")


def _token(route_R: jax.Array, row_AK: jax.Array) -> jax.Array:
    return jnp.where(route_R >= 0, route_R // row_AK.shape[1], -1)
