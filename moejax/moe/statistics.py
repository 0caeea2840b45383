"""What a layer reports, and the metrics made from it. Requested and kept routes are two counts, never one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.moe.router import Route


class Statistics(NamedTuple):
    """Of one layer on one device, over one microbatch; sums, so they add up over devices and microbatches.

    Attributes:
        requested_E: Routes asked for, per expert, int32.
        dropped: Routes without a place, int32.
        balance_sum: Balance loss times tokens, float32.
        z_sum: Router z-loss summed over tokens, float32.
    """

    requested_E: jax.Array
    dropped: jax.Array
    balance_sum: jax.Array
    z_sum: jax.Array


def count_routes(route: Route, kept_TK: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Requested routes per expert and the number of dropped ones."""
    requested = jnp.bincount(route.expert_TK.reshape(-1), length=num_experts + 1)[:num_experts].astype(jnp.int32)
    return requested, jnp.sum(requested) - jnp.sum(kept_TK, dtype=jnp.int32)


def summarize(requested_LE: jax.Array, dropped_L: jax.Array) -> dict[str, jax.Array]:
    """Metrics of a whole step from counts of all devices and microbatches.

    Returns:
        `moe/requested_max_over_mean` (of the worst layer), `moe/dropped_fraction` (of all routes),
        `moe/dead_experts` (experts of any layer that no token asked for).
    """
    requested = requested_LE.astype(jnp.float32)
    mean = jnp.maximum(jnp.mean(requested, axis=1), 1e-9)
    return {
        "moe/requested_max_over_mean": jnp.max(jnp.max(requested, axis=1) / mean),
        "moe/dropped_fraction": jnp.sum(dropped_L).astype(jnp.float32) / jnp.maximum(jnp.sum(requested), 1.0),
        "moe/dead_experts": jnp.sum(requested_LE == 0).astype(jnp.int32),
    }
