"""Exchange `local`: every device holds all experts, rows only change places."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from moejax.moe.admission import Capacity, admit, sort_routes
from moejax.moe.exchange.interface import Plan, place
from moejax.moe.rows import inverse, sum_rows, take_rows


@dataclass(frozen=True)
class Local:
    """Rows sorted by expert, on one device.

    Attributes:
        num_experts: Experts E.
        capacity: Budget of the buffer, pooled over all experts: factor x K x T.
    """

    num_experts: int
    capacity: Capacity

    def plan(self, expert_TK: jax.Array, weight_TK: jax.Array) -> Plan:
        """Sort, admit, place."""
        routes = expert_TK.size
        rows = self.capacity.rows(routes, routes, self.num_experts)
        by_expert = sort_routes(expert_TK, weight_TK, self.num_experts, self.capacity.by_weight)
        kept_SE = admit(by_expert.counts_E[None], by_expert.weight_N[None], 1, rows, self.capacity)
        places = place(expert_TK, by_expert, kept_SE, 0, 1)
        maps = {"row_TK": places.row_TK, "route_R": inverse(places.row_TK, rows)}
        return Plan(places.kept_TK, kept_SE[0], jnp.int32(0), jnp.int32(0), maps).named()

    def dispatch(self, x_TD: jax.Array, weight_TK: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array, Plan]:
        """Gather token rows in order of their experts."""
        row_TK, route_R = plan.maps["row_TK"], plan.maps["route_R"]
        rows_RD = take_rows(x_TD, _token(route_R, row_TK), row_TK)
        return rows_RD, take_rows(weight_TK.reshape(-1), route_R, row_TK.reshape(-1, 1)), plan

    def combine(self, rows_RD: jax.Array, plan: Plan) -> jax.Array:
        """Add up each token's results."""
        row_TK, route_R = plan.maps["row_TK"], plan.maps["route_R"]
        return sum_rows(rows_RD, row_TK, _token(route_R, row_TK))


def _token(route_R: jax.Array, row_TK: jax.Array) -> jax.Array:
    return jnp.where(route_R >= 0, route_R // row_TK.shape[1], -1)
