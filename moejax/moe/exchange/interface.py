"""The interface of an exchange, and where admitted routes go.

`plan` decides where each route goes, `dispatch` brings rows and routing weights to the experts, `combine`
brings the weighted results back and adds them up. Dispatch and combine of rows are adjoint: each is the
gradient of the other.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.moe.admission import Sorted, starts


class Plan(NamedTuple):
    """Where routes go.

    Attributes:
        kept_TK: Routes that have a place.
        sizes_e: Rows of each local expert, in the order of the rows that `dispatch` returns.
        sent: Rows of width D that this device sends to others in one dispatch, int32.
        saved: Rows that it would send in addition without de-duplication, int32.
        maps: Index arrays of the exchange that made the plan.
    """

    kept_TK: jax.Array
    sizes_e: jax.Array
    sent: jax.Array
    saved: jax.Array
    maps: dict[str, jax.Array]

    def named(self) -> "Plan":
        """With every array as a checkpoint point: recomputation neither sorts nor counts again."""
        return jax.tree.map(lambda array: checkpoint_name(array, "plan"), self)


class Exchange(Protocol):
    """How rows reach experts."""

    def plan(self, expert_TK: jax.Array, weight_TK: jax.Array) -> Plan:
        """Place every route; those of `num_experts` (padding) go nowhere. Weights only order admission."""
        ...

    def dispatch(self, x_TD: jax.Array, weight_TK: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array, Plan]:
        """Rows [R, D] of the local experts, expert after expert, and their weights [R]; the tail holds anything.

        The plan comes back with what was learnt on arrival.
        """
        ...

    def combine(self, rows_RD: jax.Array, plan: Plan) -> jax.Array:
        """Sum of the results of each token's routes [T, D]; zero for tokens without a place."""
        ...


class Places(NamedTuple):
    """Where the routes of one source go.

    Attributes:
        rank_TK: Rank of the chosen expert; `ranks` for no expert.
        kept_TK: Whether the route is admitted.
        row_TK: Row in the buffer of that rank, -1 if not admitted: local expert, then source, then priority.
    """

    rank_TK: jax.Array
    kept_TK: jax.Array
    row_TK: jax.Array


def place(expert_TK: jax.Array, by_expert: Sorted, kept_SE: jax.Array, source: jax.Array | int, ranks: int) -> Places:
    """Rows in the buffers of all ranks, from the admitted counts of all sources (report section 5.4)."""
    sources, num_experts = kept_SE.shape
    kept_QeS = kept_SE.reshape(sources, ranks, -1).transpose(1, 2, 0)
    base_QeS = starts(kept_QeS.reshape(ranks, -1)).reshape(kept_QeS.shape)
    base_SE = base_QeS.transpose(2, 0, 1).reshape(sources, num_experts)
    expert = jnp.minimum(expert_TK, num_experts - 1)
    kept = (expert_TK < num_experts) & (by_expert.within_TK < kept_SE[source][expert])
    row = jnp.where(kept, base_SE[source][expert] + by_expert.within_TK, -1)
    return Places(expert_TK // (num_experts // ranks), kept, row)
