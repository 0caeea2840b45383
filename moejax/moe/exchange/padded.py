"""Exchange `padded`: a static all_to_all of [peer, slots] rows over the expert axis.

Each source packs the rows for each peer into a fixed number of slots, sorted by expert. The receiver
knows all counts (one small all_gather), so it finds every row's place without sorting.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.moe.exchange.interface import Plan, budget, sort_routes, starts
from moejax.moe.rows import take_rows


@dataclass(frozen=True)
class Padded:
    """Static all_to_all over `axis`.

    Attributes:
        num_experts: Experts E over all ranks.
        ranks: Size of the expert axis.
        axis: Mesh axis of the experts.
        capacity: Factor on the balanced K x T / ranks rows per source and destination; None for no drop.
    """

    num_experts: int
    ranks: int
    axis: str
    capacity: float | None

    def plan(self, expert_TK: jax.Array) -> Plan:
        """Slots at the source, and places at the receiver, from counts of all ranks."""
        tokens, top_k = expert_TK.shape
        local = self.num_experts // self.ranks
        slots = budget(self.capacity, -(-tokens * top_k // self.ranks), tokens * min(top_k, local))
        by_expert = sort_routes(expert_TK, self.num_experts)
        counts_pe = by_expert.counts.reshape(self.ranks, local)
        sizes_pe = jnp.clip(slots - starts(counts_pe), 0, counts_pe)
        first_p = starts(jnp.sum(counts_pe, axis=1))  # sorted place of the first route to each peer

        rank_TK = expert_TK // local
        within = by_expert.place.reshape(expert_TK.shape) - first_p[jnp.minimum(rank_TK, self.ranks - 1)]
        kept_TK = (rank_TK < self.ranks) & (within < slots)
        slot_TK = jnp.where(kept_TK, rank_TK * slots + within, -1)
        used = jnp.arange(slots)[None] < jnp.sum(sizes_pe, axis=1)[:, None]
        sorted_place = jnp.minimum(first_p[:, None] + jnp.arange(slots)[None], tokens * top_k - 1)
        route_PC = jnp.where(used, by_expert.order[sorted_place], -1)

        sizes_spe = lax.all_gather(sizes_pe, self.axis)
        arriving_se = lax.dynamic_index_in_dim(sizes_spe, lax.axis_index(self.axis), axis=1, keepdims=False)
        source_R, place_R = _receiver_maps(arriving_se, slots)
        maps = {"slot_TK": slot_TK, "route_R": route_PC.reshape(-1), "source_R": source_R, "place_R": place_R}
        maps = {name: checkpoint_name(value, "plan") for name, value in maps.items()}
        return Plan(kept_TK, jnp.sum(arriving_se, axis=0), maps)

    def _swap(self, rows_RD: jax.Array) -> jax.Array:
        rows = rows_RD.reshape(self.ranks, -1, rows_RD.shape[-1])
        return checkpoint_name(lax.all_to_all(rows, self.axis, 0, 0).reshape(rows_RD.shape), "exchange")

    def dispatch(self, x_TD: jax.Array, plan: Plan) -> jax.Array:
        """Pack, exchange, put in order of the local experts."""
        maps = plan.maps
        token_R = jnp.where(maps["route_R"] >= 0, maps["route_R"] // maps["slot_TK"].shape[1], -1)
        received = self._swap(take_rows(x_TD, token_R, maps["slot_TK"]))
        return take_rows(received, maps["source_R"], maps["place_R"][:, None])

    def combine(self, rows_RD: jax.Array, plan: Plan) -> jax.Array:
        """The way of `dispatch` backwards."""
        maps = plan.maps
        returned = self._swap(take_rows(rows_RD, maps["place_R"], maps["source_R"][:, None]))
        picked = take_rows(returned, maps["slot_TK"].reshape(-1), maps["route_R"][:, None])
        return picked.reshape(*maps["slot_TK"].shape, -1)


def _receiver_maps(arriving_se: jax.Array, slots: int) -> tuple[jax.Array, jax.Array]:
    """Received row of each expert-ordered place, and its inverse; -1 where there is none.

    Args:
        arriving_se: Rows from each source for each local expert; each source's rows are sorted by expert.
        slots: Rows that each source sends, used or not.
    """
    sources, _ = arriving_se.shape
    places = jnp.arange(sources * slots, dtype=jnp.int32)
    first_se = starts(arriving_se)  # within the source's slots
    sizes_es = arriving_se.T.reshape(-1)  # expert-major: the order of places
    base_es = starts(sizes_es)
    base_se = base_es.reshape(-1, sources).T

    part = jnp.minimum(jnp.searchsorted(base_es + sizes_es, places, side="right"), sizes_es.size - 1)
    expert, source = part // sources, part % sources
    row = source * slots + first_se[source, expert] + places - base_es[part]
    source_R = jnp.where(places < jnp.sum(sizes_es), row, -1).astype(jnp.int32)

    source, slot = places // slots, places % slots
    ends_se = first_se + arriving_se
    expert = jnp.sum(slot[:, None] >= ends_se[source], axis=1)
    found = expert < arriving_se.shape[1]
    expert = jnp.minimum(expert, arriving_se.shape[1] - 1)
    place = base_se[source, expert] + slot - first_se[source, expert]
    return source_R, jnp.where(found, place, -1).astype(jnp.int32)
