"""Admission: which routes get a place when a buffer is smaller than the demand.

Routes of one source are sorted by expert and, within an expert, by priority. Whatever the order of
admission, the admitted routes of one (source, expert) split are then a prefix of it, so that a matrix of
counts says everything. Every rank computes the same matrix from the same gathered counts.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.varying import vary, varying_axes


@dataclass(frozen=True)
class Capacity:
    """How much a buffer holds and who gets it.

    Args:
        factor: Times the balanced number of routes; None when nothing may drop.
        per_expert: Divide the budget evenly among the experts that share the buffer, instead of pooling it.
        by_weight: Drop the lowest routing weights first, instead of the highest local experts, source ranks
            and positions (report section 10.3).
    """

    factor: float | None = None
    per_expert: bool = False
    by_weight: bool = False

    def rows(self, balanced: int, limit: int, experts: int) -> int:
        """Rows of a buffer shared by `experts`, given the balanced number of routes and the most that can come."""
        if self.factor is None:
            return limit
        if self.per_expert:
            return min(limit, experts * max(1, math.ceil(self.factor * balanced / experts)))
        return min(limit, max(1, math.ceil(self.factor * balanced)))


class Sorted(NamedTuple):
    """Routes of one source in order of expert, then priority, then position.

    Attributes:
        order_N: Route (token * K + choice) at each of N = T * K sorted places.
        within_TK: Place of a route among the routes of its expert.
        counts_E: Routes of each expert; routes to no expert come last and are not counted.
        weight_N: Routing weight in sorted order; zeros when weights do not matter.
    """

    order_N: jax.Array
    within_TK: jax.Array
    counts_E: jax.Array
    weight_N: jax.Array


def sort_routes(expert_TK: jax.Array, weight_TK: jax.Array, num_experts: int, by_weight: bool) -> Sorted:
    """Sort routes by expert; by falling weight within an expert if asked, else by position."""
    expert = expert_TK.reshape(-1)
    index = vary(jnp.arange(expert.size, dtype=jnp.int32), varying_axes(expert))
    weight = lax.stop_gradient(weight_TK).reshape(-1).astype(jnp.float32)
    if by_weight:
        expert_N, falling, order = lax.sort((expert, -weight, index), num_keys=2, is_stable=True)
        weight_N = -falling
    else:
        expert_N, order = lax.sort((expert, index), num_keys=1, is_stable=True)
        weight_N = jnp.zeros_like(weight)
    counts = jnp.bincount(expert, length=num_experts + 1).astype(jnp.int32)
    within_N = index - starts(counts)[expert_N]
    within = jnp.zeros_like(within_N).at[order].set(within_N, unique_indices=True)
    return Sorted(order, within.reshape(expert_TK.shape), counts[:num_experts], weight_N)


def starts(sizes: jax.Array, axis: int = -1) -> jax.Array:
    """Exclusive cumulative sum: where each part starts."""
    return jnp.cumsum(sizes, axis=axis, dtype=jnp.int32) - sizes


def admit(counts_SE: jax.Array, weight_SN: jax.Array, pools: int, rows: int, capacity: Capacity) -> jax.Array:
    """Admitted routes of each (source, expert) split.

    Args:
        counts_SE: Requested routes of the sources that share buffers.
        weight_SN: Weights in the order of `sort_routes`, one row a source; read in order of weight only.
        pools: Buffers; each serves E / pools consecutive experts.
        rows: Rows of one buffer.
        capacity: Order of admission, and whether experts have budgets of their own.
    """
    if capacity.factor is None:
        return counts_SE
    sources, num_experts = counts_SE.shape
    if capacity.per_expert:
        pools, rows = num_experts, rows * pools // num_experts
    if capacity.by_weight:
        return _admit_by_weight(counts_SE, weight_SN, pools, rows)
    counts_QeS = counts_SE.reshape(sources, pools, -1).transpose(1, 2, 0)
    flat_QX = counts_QeS.reshape(pools, -1)
    kept_QX = jnp.clip(rows - starts(flat_QX), 0, flat_QX)
    return kept_QX.reshape(counts_QeS.shape).transpose(2, 0, 1).reshape(sources, num_experts)


def _admit_by_weight(counts_SE: jax.Array, weight_SN: jax.Array, pools: int, rows: int) -> jax.Array:
    """The `rows` largest weights of each pool; ties in order of source, expert, position."""
    (sources, num_experts), routes = counts_SE.shape, weight_SN.shape[1]
    ends_SE = jnp.cumsum(counts_SE, axis=1)
    place = jnp.arange(routes, dtype=jnp.int32)
    expert_SN = jax.vmap(lambda ends: jnp.searchsorted(ends, place, side="right"))(ends_SE).astype(jnp.int32)
    split_SN = jnp.arange(sources, dtype=jnp.int32)[:, None] * (num_experts + 1) + expert_SN
    pool_SN = expert_SN // (num_experts // pools)  # `pools` for routes to no expert
    keys = (pool_SN.reshape(-1), -weight_SN.reshape(-1), split_SN.reshape(-1))
    pool, _, split = lax.sort(vary(keys, varying_axes(keys)), num_keys=2, is_stable=True)
    sizes_Q = jnp.bincount(pool, length=pools + 1).astype(jnp.int32)
    kept = (jnp.arange(pool.size, dtype=jnp.int32) - starts(sizes_Q)[pool] < rows) & (pool < pools)
    kept_SE = jnp.zeros(sources * (num_experts + 1), jnp.int32)
    kept_SE = vary(kept_SE, varying_axes(kept)).at[split].add(kept.astype(jnp.int32))
    return kept_SE.reshape(sources, num_experts + 1)[:, :num_experts]


def admit_all(by_expert: Sorted, axes: tuple[str, ...], ranks: int, rows: int, capacity: Capacity) -> jax.Array:
    """Admitted routes [S, E] of all sources along `axes`, whose buffers hold `rows` for all sources together."""
    counts_SE = lax.all_gather(by_expert.counts_E, axes)
    by_weight = capacity.factor is not None and capacity.by_weight
    weight_SN = lax.all_gather(by_expert.weight_N, axes) if by_weight else by_expert.weight_N[None]
    return admit(counts_SE, weight_SN, ranks, rows, capacity)
