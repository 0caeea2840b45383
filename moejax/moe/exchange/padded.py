"""Exchange `padded`: a static all_to_all of [peer, slots] rows over the expert axis. Runs everywhere.

Each source packs the parcels for each peer into a fixed number of slots. With the row goes, for each of its
routes, the row of the expert buffer that it belongs to, so that the receiver neither sorts nor searches.
The budget is per source and destination, because the slots are.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.moe.admission import Capacity, admit, sort_routes
from moejax.moe.exchange.interface import Plan, place
from moejax.moe.exchange.parcels import make_parcels, make_shared_parcels, pack
from moejax.moe.rows import inverse, sum_rows, take_rows


@dataclass(frozen=True)
class Padded:
    """Static all_to_all over `axis`.

    Attributes:
        num_experts: Experts E over all ranks.
        ranks: Size of the expert axis.
        axis: Mesh axis of the experts.
        capacity: Budget of each source and destination: factor x K x T / ranks.
        deduplicate: Send a token once to a rank, however many of its experts it chose.
    """

    num_experts: int
    ranks: int
    axis: str
    capacity: Capacity
    deduplicate: bool

    def plan(self, expert_TK: jax.Array, weight_TK: jax.Array) -> Plan:
        """Slots at the source, and rows at the receiver."""
        tokens, top_k = expert_TK.shape
        local = self.num_experts // self.ranks
        budget = self.capacity.rows(-(-tokens * top_k // self.ranks), tokens * min(top_k, local), local)
        by_expert = sort_routes(expert_TK, weight_TK, self.num_experts, self.capacity.by_weight)
        kept_E = admit(by_expert.counts_E[None], by_expert.weight_N[None], self.ranks, budget, self.capacity)[0]
        kept_SE, me = lax.all_gather(kept_E, self.axis), lax.axis_index(self.axis)
        places = place(expert_TK, by_expert, kept_SE, me, self.ranks)
        if self.deduplicate:
            slots, lanes, parcels = min(budget, tokens), min(top_k, local), make_shared_parcels(places, self.ranks)
        else:
            slots, lanes, parcels = budget, 1, make_parcels(places, expert_TK, by_expert, kept_E, self.ranks)
        packing = pack(places, parcels, jnp.arange(self.ranks) * slots, self.ranks * slots, lanes)
        row_VJ = self._swap(packing.row_WJ)
        maps = packing._asdict() | {"row_VJ": row_VJ, "lane_R": inverse(row_VJ, self.ranks * budget)}
        maps = {name: checkpoint_name(value, "plan") for name, value in maps.items()}
        sizes_e = jnp.sum(kept_SE.reshape(-1, self.ranks, local)[:, me], axis=0)
        away = jnp.arange(self.ranks) != me
        saved = jnp.sum(jnp.where(away, jnp.sum(kept_E.reshape(self.ranks, local), axis=1) - parcels.count_P, 0))
        return Plan(places.kept_TK, sizes_e, jnp.int32((self.ranks - 1) * slots), saved, maps)

    def _swap(self, rows_WX: jax.Array) -> jax.Array:
        rows = rows_WX.reshape(self.ranks, -1, *rows_WX.shape[1:])
        return lax.all_to_all(rows, self.axis, 0, 0).reshape(rows_WX.shape)

    def _send(self, rows_WX: jax.Array) -> jax.Array:
        return checkpoint_name(self._swap(rows_WX), "exchange")

    def dispatch(self, x_TD: jax.Array, weight_TK: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
        """Pack, exchange, put in order of the local experts."""
        maps = plan.maps
        lanes = maps["row_VJ"].shape[1]
        received_VD = self._send(take_rows(x_TD, maps["token_W"], maps["slots_TK"]))
        weight_WJ = take_rows(weight_TK.reshape(-1), maps["route_WJ"].reshape(-1), maps["lane_TK1"])
        weight_VJ = self._send(weight_WJ.reshape(-1, lanes))
        rows_RD = take_rows(received_VD, _slot(maps["lane_R"], lanes), maps["row_VJ"])
        return rows_RD, take_rows(weight_VJ.reshape(-1), maps["lane_R"], maps["row_VJ"].reshape(-1, 1))

    def combine(self, rows_RD: jax.Array, plan: Plan) -> jax.Array:
        """The way of `dispatch` backwards."""
        maps = plan.maps
        sums_VD = sum_rows(rows_RD, maps["row_VJ"], _slot(maps["lane_R"], maps["row_VJ"].shape[1]))
        return sum_rows(self._send(sums_VD), maps["slots_TK"], maps["token_W"])


def _slot(lane_R: jax.Array, lanes: int) -> jax.Array:
    return jnp.where(lane_R >= 0, lane_R // lanes, -1)
