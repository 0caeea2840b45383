"""The interface of an exchange, and the sorting that every exchange starts with.

`plan` decides where each route goes, `dispatch` brings rows to their experts, `combine` brings results
back and adds them up. Dispatch and combine are adjoint: each is the gradient of the other.
"""

import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Plan(NamedTuple):
    """Where routes go.

    Attributes:
        kept_TK: Routes that have a place.
        sizes_e: Rows of each local expert, in the order of the rows that `dispatch` returns.
        maps: Index arrays of the exchange that made the plan.
    """

    kept_TK: jax.Array
    sizes_e: jax.Array
    maps: dict[str, jax.Array]


class Exchange(Protocol):
    """How rows reach experts."""

    def plan(self, expert_TK: jax.Array) -> Plan:
        """Place every route; those of `num_experts` (padding) go nowhere."""
        ...

    def dispatch(self, x_TD: jax.Array, plan: Plan) -> jax.Array:
        """Rows [R, D] of the local experts, expert after expert; rows past the sum of sizes are zero."""
        ...

    def combine(self, rows_RD: jax.Array, plan: Plan) -> jax.Array:
        """Result of each route [T, K, D] at its token; zero for routes without a place."""
        ...


class Sorted(NamedTuple):
    """Routes in order of their expert, stable by position.

    Attributes:
        order: [T K] route (token * K + choice) at each sorted place.
        place: [T K] sorted place of each route: the inverse of `order`.
        counts: [E] routes of each expert; routes to no expert come last and are not counted.
    """

    order: jax.Array
    place: jax.Array
    counts: jax.Array


def sort_routes(expert_TK: jax.Array, num_experts: int) -> Sorted:
    """Sort routes by expert."""
    expert = expert_TK.reshape(-1)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    counts = jnp.bincount(expert, length=num_experts + 1)[:num_experts].astype(jnp.int32)
    return Sorted(order, place, counts)


def starts(sizes: jax.Array, axis: int = -1) -> jax.Array:
    """Exclusive cumulative sum: where each part starts."""
    return jnp.cumsum(sizes, axis=axis, dtype=jnp.int32) - sizes


def budget(capacity: float | None, routes: int, limit: int) -> int:
    """Rows of a buffer: `ceil(capacity * routes)`, at least 1, at most `limit`; `limit` when nothing may drop."""
    return limit if capacity is None else min(limit, max(1, math.ceil(capacity * routes)))
