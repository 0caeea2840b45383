"""Parcels: what crosses the wire. A parcel is a row of D numbers with the routes that it serves.

Without de-duplication a parcel is one route. With it, a parcel is one token for one rank, and carries up to
J = min(K, local experts) routes: the row crosses once, the expert rank copies it to its experts on arrival
and adds up their weighted results before it sends one row back.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.moe.admission import Sorted, starts
from moejax.moe.exchange.interface import Places
from moejax.moe.rows import inverse


class Parcels(NamedTuple):
    """Parcels of one source, numbered within each destination rank.

    Attributes:
        number_TK: Parcel of each admitted route, -1 for others.
        lane_TK: Which of the parcel's J routes it is; a parcel is led by lane 0.
        count_P: Parcels for each rank.
    """

    number_TK: jax.Array
    lane_TK: jax.Array
    count_P: jax.Array


def make_parcels(places: Places, expert_TK: jax.Array, by_expert: Sorted, kept_E: jax.Array, ranks: int) -> Parcels:
    """One parcel a route, in order of expert."""
    kept_Pe = kept_E.reshape(ranks, -1)
    first_E = starts(kept_Pe).reshape(-1)
    number = first_E[jnp.minimum(expert_TK, first_E.size - 1)] + by_expert.within_TK
    number_TK = jnp.where(places.kept_TK, number, -1)
    return Parcels(number_TK, jnp.zeros_like(number_TK), jnp.sum(kept_Pe, axis=1))


def make_shared_parcels(places: Places, ranks: int) -> Parcels:
    """One parcel for all routes of a token to one rank, in order of tokens."""
    rank_TK = jnp.where(places.kept_TK, places.rank_TK, ranks)
    same_TKK = rank_TK[:, :, None] == rank_TK[:, None, :]
    earlier = jnp.tri(rank_TK.shape[1], k=-1, dtype=bool)
    lane_TK = jnp.sum(same_TKK & earlier, axis=2, dtype=jnp.int32)
    goes_TP = jnp.any(rank_TK[:, :, None] == jnp.arange(ranks), axis=1)
    number_TP = starts(goes_TP.astype(jnp.int32), axis=0)
    number_TK = jnp.take_along_axis(number_TP, jnp.minimum(rank_TK, ranks - 1), axis=1)
    number_TK = jnp.where(places.kept_TK, number_TK, -1)
    return Parcels(number_TK, lane_TK, jnp.sum(goes_TP, axis=0, dtype=jnp.int32))


class Packing(NamedTuple):
    """The send buffer of W slots.

    Attributes:
        slots_TK: Slots that take a token's row, one per parcel, else -1.
        token_W: Token of each slot.
        lane_TK1: Flat place (slot * J + lane) of each route, [T * K, 1], -1 if not admitted.
        route_WJ: Route at each place.
        row_WJ: Row of each route in the buffer of its rank.
    """

    slots_TK: jax.Array
    token_W: jax.Array
    lane_TK1: jax.Array
    route_WJ: jax.Array
    row_WJ: jax.Array


def pack(places: Places, parcels: Parcels, offset_P: jax.Array, slots: int, lanes: int) -> Packing:
    """Lay parcels into slots; those for rank p start at `offset_P[p]`."""
    rank = jnp.minimum(places.rank_TK, offset_P.size - 1)
    slot_TK = jnp.where(places.kept_TK, offset_P[rank] + parcels.number_TK, -1)
    lane_TK = jnp.where(places.kept_TK, slot_TK * lanes + parcels.lane_TK, -1)
    leading_TK = jnp.where(parcels.lane_TK == 0, slot_TK, -1)
    leader_W = inverse(leading_TK, slots)
    token_W = jnp.where(leader_W >= 0, leader_W // slot_TK.shape[1], -1)
    route_WJ = inverse(lane_TK, slots * lanes).reshape(slots, lanes)
    row_WJ = jnp.where(route_WJ >= 0, places.row_TK.reshape(-1)[jnp.maximum(route_WJ, 0)], -1)
    return Packing(leading_TK, token_W, lane_TK.reshape(-1, 1), route_WJ, row_WJ)
