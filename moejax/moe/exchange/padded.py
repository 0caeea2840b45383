"""Exchange `padded`: a static all_to_all of [peer, slots] rows over the expert axes. Runs everywhere.

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
from moejax.moe.exchange.payload import Wire
from moejax.moe.exchange.transport import swap
from moejax.moe.rows import inverse, sum_rows, take_rows


@dataclass(frozen=True)
class Padded:
    """Static all_to_all over `axes`.

    Attributes:
        num_experts: Experts E over all ranks.
        ranks: Devices along those axes together.
        axes: Mesh axes of the experts, outermost first.
        capacity: Budget of each source and destination: factor x K x T / ranks.
        deduplicate: Send a token once to a rank, however many of its experts it chose.
        wire: Form of dispatched rows on their way.
    """

    num_experts: int
    ranks: int
    axes: tuple[str, ...]
    capacity: Capacity
    deduplicate: bool
    wire: Wire = None

    def _budget(self, tokens: int, top_k: int) -> int:
        """Routes from one source to one destination."""
        local = self.num_experts // self.ranks
        return self.capacity.rows(-(-tokens * top_k // self.ranks), tokens * min(top_k, local), local)

    def plan(self, expert_TK: jax.Array, weight_TK: jax.Array) -> Plan:
        """Slots at the source, and rows at the receiver."""
        tokens, top_k = expert_TK.shape
        local = self.num_experts // self.ranks
        budget = self._budget(tokens, top_k)
        by_expert = sort_routes(expert_TK, weight_TK, self.num_experts, self.capacity.by_weight)
        kept_E = admit(by_expert.counts_E[None], by_expert.weight_N[None], self.ranks, budget, self.capacity)[0]
        kept_SE, me = lax.all_gather(kept_E, self.axes), lax.axis_index(self.axes)
        places = place(expert_TK, by_expert, kept_SE, me, self.ranks)
        if self.deduplicate:
            slots, lanes, parcels = min(budget, tokens), min(top_k, local), make_shared_parcels(places, self.ranks)
        else:
            slots, lanes, parcels = budget, 1, make_parcels(places, expert_TK, by_expert, kept_E, self.ranks)
        packing = pack(places, parcels, jnp.arange(self.ranks) * slots, self.ranks * slots, lanes)
        sizes_e = jnp.sum(kept_SE.reshape(-1, self.ranks, local)[:, me], axis=0)
        sent, saved = (jnp.int32((self.ranks - 1) * n) for n in (slots, budget - slots))  # slots cross, full or not
        return Plan(places.kept_TK, sizes_e, sent, saved, packing._asdict()).named()

    def dispatch(self, x_TD: jax.Array, weight_TK: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array, Plan]:
        """Pack, exchange, put in order of the local experts."""
        maps = plan.maps
        slots, lanes = maps["row_WJ"].shape
        rows_WD = take_rows(x_TD, maps["token_W"], maps["slots_TK"])
        weight_WJ = take_rows(weight_TK.reshape(-1), maps["route_WJ"].reshape(-1), maps["lane_TK1"])
        sent = (rows_WD, weight_WJ.reshape(slots, lanes), maps["row_WJ"])
        arrived = swap(sent, self.axes, self.ranks, self.wire)
        received_VD, weight_VJ, row_VJ = (checkpoint_name(a, "exchange") for a in arrived)
        lane_R = inverse(row_VJ, self.ranks * self._budget(*weight_TK.shape))
        rows_RD = take_rows(received_VD, _slot(lane_R, lanes), row_VJ)
        weight_R = take_rows(weight_VJ.reshape(-1), lane_R, row_VJ.reshape(-1, 1))
        return rows_RD, weight_R, plan._replace(maps=maps | {"row_VJ": row_VJ, "lane_R": lane_R})

    def combine(self, rows_RD: jax.Array, plan: Plan) -> jax.Array:
        """The way of `dispatch` backwards."""
        maps = plan.maps
        sums_VD = sum_rows(rows_RD, maps["row_VJ"], _slot(maps["lane_R"], maps["row_VJ"].shape[1]))
        (back_WD,) = swap((sums_VD,), self.axes, self.ranks)
        return sum_rows(checkpoint_name(back_WD, "exchange"), maps["slots_TK"], maps["token_W"])


def _slot(lane_R: jax.Array, lanes: int) -> jax.Array:
    return jnp.where(lane_R >= 0, lane_R // lanes, -1)
