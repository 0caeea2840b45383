"""Exchange `local`: every device holds all experts, rows only change places."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from moejax.moe.exchange.interface import Plan, budget, sort_routes, starts
from moejax.moe.rows import take_rows


@dataclass(frozen=True)
class Local:
    """Rows sorted by expert, on one device.

    Attributes:
        num_experts: Experts E.
        capacity: Factor on K x T rows that the buffer holds; None for no drop.
    """

    num_experts: int
    capacity: float | None

    def plan(self, expert_TK: jax.Array) -> Plan:
        """Sort routes; those past the budget are dropped, highest experts first."""
        routes = expert_TK.size
        rows = budget(self.capacity, routes, routes)
        by_expert = sort_routes(expert_TK, self.num_experts)
        sizes = jnp.clip(rows - starts(by_expert.counts), 0, by_expert.counts)
        slot = jnp.where(by_expert.place < jnp.sum(sizes), by_expert.place, -1)
        route = jnp.where(jnp.arange(rows) < jnp.sum(sizes), by_expert.order[:rows], -1)
        slot_TK = slot.reshape(expert_TK.shape)
        return Plan(slot_TK >= 0, sizes, {"slot_TK": slot_TK, "route_R": route})

    def dispatch(self, x_TD: jax.Array, plan: Plan) -> jax.Array:
        """Gather token rows in order of their experts."""
        slot_TK, route_R = plan.maps["slot_TK"], plan.maps["route_R"]
        token_R = jnp.where(route_R >= 0, route_R // slot_TK.shape[1], -1)
        return take_rows(x_TD, token_R, slot_TK)

    def combine(self, rows_RD: jax.Array, plan: Plan) -> jax.Array:
        """Gather each route's result."""
        slot_TK, route_R = plan.maps["slot_TK"], plan.maps["route_R"]
        picked = take_rows(rows_RD, slot_TK.reshape(-1), route_R[:, None])
        return picked.reshape(*slot_TK.shape, -1)
