"""Oracles of the MoE layer: a dense loop over experts, and admission of one route after the other."""

import math

import jax
import jax.numpy as jnp
import numpy as np

HIGHEST = jax.lax.Precision.HIGHEST


def dense_layer(x_TD, valid_T, kept_TK, expert_TK, weights, config):
    """Every expert on every token; the choice and the admitted routes are given, the weights are not."""
    m = config.model.moe
    logits = jnp.matmul(x_TD, weights["router"], precision=HIGHEST) + weights["bias"]
    scores = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    chosen = (expert_TK[:, :, None] == jnp.arange(m.num_experts)).any(1) & valid_T[:, None]
    kept = ((expert_TK[:, :, None] == jnp.arange(m.num_experts)) & kept_TK[:, :, None]).any(1)
    share = jnp.where(chosen, scores, 0.0)
    if m.merge == "sum_to_one":
        share = share / jnp.where(chosen.any(-1, keepdims=True), share.sum(-1, keepdims=True), 1.0)
    if config.moe.renormalize_dropped:
        left = jnp.where(kept, share, 0.0).sum(-1, keepdims=True)
        share = share * jnp.where(left > 0, 1 / jnp.where(left > 0, left, 1.0), 1.0)
    y = jnp.zeros_like(x_TD)
    for e in range(m.num_experts):
        gate, up = (jnp.matmul(x_TD, weights["gate_up"][e, :, g], precision=HIGHEST) for g in (0, 1))
        hidden = jnp.matmul(gate / (1 + jnp.exp(-gate)) * up, weights["down"][e], precision=HIGHEST)
        y = y + jnp.where(kept[:, e], share[:, e], 0.0)[:, None] * hidden
    return y


def admitted(expert_STK: np.ndarray, weight_STK: np.ndarray, num_experts: int, capacity, exchange: str) -> np.ndarray:
    """Kept routes, one after the other in order of admission while their buffer has room."""
    sources, tokens, top_k = expert_STK.shape
    local = num_experts // sources
    if capacity.factor is None:
        return expert_STK < num_experts
    balanced = -(-tokens * top_k // sources) if exchange == "padded" else tokens * top_k
    budget = max(1, math.ceil(capacity.factor * balanced))
    if capacity.per_expert:
        budget = max(1, math.ceil(capacity.factor * balanced / local))
    routes = []
    for s, t, k in np.ndindex(expert_STK.shape):
        expert = int(expert_STK[s, t, k])
        if expert < num_experts:
            position = t * top_k + k
            order = (-float(weight_STK[s, t, k]), s, expert, position) if capacity.by_weight else (expert, s, position)
            buffer = (expert if capacity.per_expert else expert // local, s if exchange == "padded" else None)
            routes.append((order, buffer, (s, t, k)))
    kept, used = np.zeros(expert_STK.shape, bool), {}
    for _, buffer, route in sorted(routes):
        if used.get(buffer, 0) < budget:
            used[buffer] = used.get(buffer, 0) + 1
            kept[route] = True
    return kept


def assert_close(got, want, name: str, per_expert: bool = False) -> None:
    """Relative 1e-5 of the largest entry, of every expert by itself; sums over tokens of terms near one that cancel."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.isfinite(got).all(), name
    parts = range(len(want)) if per_expert else [slice(None)]
    for part in parts:
        scale = max(
            np.abs(want[part]).max(), 1e-3 * np.abs(want).max(), 0.1 if name.endswith(("dbias", "drouter")) else 1e-30
        )
        assert np.abs(got[part] - want[part]).max() <= 1e-5 * scale, (name, part)
