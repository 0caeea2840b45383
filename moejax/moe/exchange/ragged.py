"""Exchange `ragged`: `ragged_all_to_all`, which sends what there is and nothing else.

Without de-duplication each (destination, local expert) split is one update, written where it belongs in the
expert buffer of the receiver: rows land in order of expert, nobody sorts. With it, one update a destination,
and the receiver copies rows to their experts by the row numbers that came along. The budget is per rank.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.moe import rows as rows_module
from moejax.moe.admission import Capacity, admit_all, sort_routes, starts
from moejax.moe.exchange.interface import Plan, place
from moejax.moe.exchange.parcels import make_parcels, make_shared_parcels, pack
from moejax.moe.exchange.payload import Wire
from moejax.moe.exchange.transport import Updates, send
from moejax.moe.rows import inverse, sum_rows, take_rows


@dataclass(frozen=True)
class Ragged:
    """ragged_all_to_all over `axes`.

    Attributes:
        num_experts: Experts E over all ranks.
        ranks: Devices along those axes together.
        axes: Mesh axes of the experts, outermost first.
        capacity: Budget of each destination rank: factor x K x T.
        deduplicate: Send a token once to a rank, however many of its experts it chose.
        wire: Form of dispatched rows on their way.
    """

    num_experts: int
    ranks: int
    axes: tuple[str, ...]
    capacity: Capacity
    deduplicate: bool
    wire: Wire = None

    def _sizes(self, tokens: int, top_k: int) -> tuple[int, int, int, int]:
        """Rows of expert, receive and send buffer, and routes of a parcel."""
        local = self.num_experts // self.ranks
        budget = self.capacity.rows(tokens * top_k, self.ranks * tokens * min(top_k, local), local)
        if not self.deduplicate:
            return budget, budget, tokens * top_k, 1
        return budget, min(budget, self.ranks * tokens), tokens * min(top_k, self.ranks), min(top_k, local)

    def plan(self, expert_TK: jax.Array, weight_TK: jax.Array) -> Plan:
        """Slots at the source, and rows at the receiver."""
        budget, _, slots, lanes = self._sizes(*expert_TK.shape)
        local = self.num_experts // self.ranks
        by_expert = sort_routes(expert_TK, weight_TK, self.num_experts, self.capacity.by_weight)
        kept_SE = admit_all(by_expert, self.axes, self.ranks, budget, self.capacity)
        me = lax.axis_index(self.axes)
        places = place(expert_TK, by_expert, kept_SE, me, self.ranks)
        if self.deduplicate:
            parcels = make_shared_parcels(places, self.ranks)
            sizes_SPg = lax.all_gather(parcels.count_P, self.axes)[:, :, None]
        else:
            parcels = make_parcels(places, expert_TK, by_expert, kept_SE[me], self.ranks)
            sizes_SPg = kept_SE.reshape(-1, self.ranks, local)
        packing = pack(places, parcels, starts(parcels.count_P), slots, lanes)
        updates = Updates.make(sizes_SPg, me)
        maps = packing._asdict() | updates._asdict()
        kept_P = jnp.sum(kept_SE[me].reshape(self.ranks, local), axis=1)
        away = jnp.arange(self.ranks) != me
        sent = jnp.sum(jnp.where(away, parcels.count_P, 0))
        saved = jnp.sum(jnp.where(away, kept_P - parcels.count_P, 0))
        sizes_e = jnp.sum(kept_SE.reshape(-1, self.ranks, local)[:, me], axis=0)
        return Plan(places.kept_TK, sizes_e, sent, saved, maps).named()

    def _send(
        self, arrays: tuple[jax.Array, ...], size: int, updates: Updates, wire: Wire = None
    ) -> tuple[jax.Array, ...]:
        fills = tuple(rows_module.UNWRITTEN if jnp.issubdtype(a.dtype, jnp.floating) else -1 for a in arrays)
        return tuple(checkpoint_name(a, "exchange") for a in send(arrays, size, updates, self.axes, fills, wire))

    def dispatch(self, x_TD: jax.Array, weight_TK: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array, Plan]:
        """Pack, exchange; with de-duplication copy to the local experts."""
        maps, updates = plan.maps, _updates(plan)
        budget, arriving, _, lanes = self._sizes(*weight_TK.shape)
        weight_WJ = take_rows(weight_TK.reshape(-1), maps["route_WJ"].reshape(-1), maps["lane_TK1"])
        sent = (take_rows(x_TD, maps["token_W"], maps["slots_TK"]), weight_WJ.reshape(-1, lanes))
        if not self.deduplicate:
            rows_RD, weight_R1 = self._send(sent, arriving, updates, self.wire)
            return rows_RD, weight_R1[:, 0], plan
        received_VD, weight_VJ, row_VJ = self._send((*sent, maps["row_WJ"]), arriving, updates, self.wire)
        lane_R = inverse(row_VJ, budget)
        rows_RD = take_rows(received_VD, _slot(lane_R, lanes), row_VJ)
        weight_R = take_rows(weight_VJ.reshape(-1), lane_R, row_VJ.reshape(-1, 1))
        return rows_RD, weight_R, plan._replace(maps=maps | {"row_VJ": row_VJ, "lane_R": lane_R})

    def combine(self, rows_RD: jax.Array, plan: Plan) -> jax.Array:
        """The way of `dispatch` backwards."""
        maps, updates = plan.maps, _updates(plan)
        if self.deduplicate:
            rows_RD = sum_rows(rows_RD, maps["row_VJ"], _slot(maps["lane_R"], maps["row_VJ"].shape[1]))
        (back_WD,) = self._send((rows_RD,), maps["token_W"].size, updates.reverse())
        return sum_rows(back_WD, maps["slots_TK"], maps["token_W"])


def _updates(plan: Plan) -> Updates:
    return Updates(*(plan.maps[name] for name in Updates._fields))


def _slot(lane_R: jax.Array, lanes: int) -> jax.Array:
    return jnp.where(lane_R >= 0, lane_R // lanes, -1)
