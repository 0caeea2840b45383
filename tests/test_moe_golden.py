"""Analytic values of the report: balance loss, admission, merge rule. Nothing here is compiled."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import MoEModelConfig
from moejax.moe.admission import Capacity, admit
from moejax.moe.balance import sequence_sum
from moejax.moe.experts import ExpertWeights, experts
from moejax.moe.router import Route, RouterWeights, route
from moejax.moe.statistics import entropy_imbalance, max_over_mean


def routing(scores, top_k: int = 1) -> Route:
    """Top-K of given scores [T, N]."""
    scores = jnp.asarray(scores, jnp.float32)
    expert = jax.lax.top_k(scores, top_k)[1]
    zeros = jnp.zeros(len(scores), jnp.float32)
    return Route(expert, jnp.take_along_axis(scores, expert, 1), scores, zeros, zeros)


def loss_and_load(scores, top_k: int = 1) -> tuple[float, float]:
    """Balance loss of one sequence, and max over mean."""
    chosen = routing(scores, top_k)
    loss = sequence_sum(chosen, jnp.ones((1, len(scores)), bool)) / len(scores)
    counts = np.bincount(np.asarray(chosen.expert_TK).ravel(), minlength=np.shape(scores)[1])
    return float(loss), float(max_over_mean(jnp.asarray(counts)))


def family(num_experts: int, active: int, top_k: int) -> np.ndarray:
    """Requests go to `active` experts alone, whose mean score is as small as their winning it allows: all experts
    that lose tie with them."""
    eps, rows = 1e-6, []
    for t in range(active):
        score = np.full(num_experts, 0.0)
        winners = [(t + j) % active for j in range(top_k)]
        score[winners] = 1.0 + eps
        score[active:] = 1.0
        rows.append(score / score.sum())
    return np.asarray(rows)


def test_balance_loss_of_six_tokens():
    loss, load = loss_and_load([[1, 0]] * 2 + [[0.4, 0.6]] * 4)
    assert loss == pytest.approx(14 / 15, abs=1e-6)
    assert load == pytest.approx(4 / 3)
    assert loss_and_load([[1, 0]] + [[0.5 - 1e-6, 0.5 + 1e-6]] * 9) == pytest.approx((0.92, 1.8), abs=1e-5)


def test_two_experts_reach_seven_eighths_at_a_quarter():
    def envelope(ones: int, of: int) -> float:
        return loss_and_load([[1, 0]] * ones + [[0.5 - 1e-6, 0.5 + 1e-6]] * (of - ones))[0]

    values = {k / 48: envelope(k, 48) for k in range(1, 25)}
    assert min(values, key=lambda x: values[x]) == 1 / 4
    assert values[1 / 4] == pytest.approx(7 / 8, abs=1e-5)
    assert values[16 / 48] == pytest.approx(8 / 9, abs=1e-5)
    for x, value in values.items():
        assert value == pytest.approx(1 - x + 2 * x * x, abs=1e-5)


@pytest.mark.parametrize(
    ("active", "top_k", "want"),
    [
        (1, 1, 1.0),
        (8, 1, 0.14035),
        (16, 1, 0.08163),
        (32, 1, 0.06061),
        (64, 1, 1.0),
        (4, 4, 1.0),
        (16, 4, 0.30769),
        (32, 4, 0.22222),
    ],
)
def test_many_experts_with_dead_ones(active, top_k, want):
    scores = family(64, active, top_k)
    loss, load = loss_and_load(scores, top_k)
    assert loss == pytest.approx(want, abs=2e-5)
    assert load == pytest.approx(64 / active)


def test_gradient_of_balance_loss():
    rng = np.random.default_rng(0)
    z, tokens, n = rng.standard_normal((40, 8)).astype(np.float32), 40, 8

    def loss(z):
        return sequence_sum(routing(jax.nn.softmax(z)), jnp.ones((1, tokens), bool)) / tokens

    p = np.exp(z.astype(np.float64))
    p /= p.sum(1, keepdims=True)
    f = np.bincount(z.argmax(1), minlength=n) / tokens
    want = n / tokens * p * (f - (p @ f)[:, None])
    np.testing.assert_allclose(jax.grad(loss)(z), want, atol=1e-7)


def test_pooled_budget_drops_none_where_private_ones_drop_two():
    counts, weight = jnp.asarray([[5, 1, 3, 3]], jnp.int32), jnp.zeros((1, 12))
    pooled = admit(counts, weight, 2, 6, Capacity(1.0))
    private = admit(counts, weight, 2, 6, Capacity(1.0, per_expert=True))
    np.testing.assert_array_equal(pooled, counts)
    np.testing.assert_array_equal(private, [[3, 1, 3, 3]])


def test_rows_of_a_buffer():
    assert Capacity(1.25).rows(30, 1000, 4) == math.ceil(1.25 * 30)
    assert Capacity(0.01).rows(30, 1000, 4) == 1
    assert Capacity(100.0).rows(30, 1000, 4) == 1000
    assert Capacity().rows(30, 1000, 4) == 1000
    assert Capacity(1.0, per_expert=True).rows(30, 1000, 4) == 4 * 8


def test_entropy_imbalance():
    np.testing.assert_allclose(entropy_imbalance(jnp.asarray([[5, 5, 5, 5], [7, 0, 0, 0]])), [0, 1], atol=1e-6)
    np.testing.assert_allclose(entropy_imbalance(jnp.asarray([1, 1, 0, 0])), 0.5, rtol=1e-6)


def test_sum_to_k_at_uniform_scores_is_the_dense_mlp_of_all_chosen_experts():
    rng = np.random.default_rng(1)
    model = MoEModelConfig(num_experts=4, top_k=3, expert_dim=5, merge="sum_to_k")
    made: Any = (rng.standard_normal(s).astype(np.float32) for s in ((6, 7), (4, 7, 2, 5), (4, 5, 7)))
    x, gate_up, down = made
    chosen = route(x, jnp.ones(6, bool), RouterWeights(jnp.zeros((7, 4))), model)
    np.testing.assert_array_equal(chosen.expert_TK, np.tile([0, 1, 2], (6, 1)))  # ties go to the lower expert
    rows: Any = np.repeat(x, 3, axis=0).reshape(6, 3, 7).transpose(1, 0, 2).reshape(18, 7)
    weight: Any = np.asarray(chosen.weight_TK).T.reshape(-1)
    sizes = jnp.asarray([6, 6, 6, 0], jnp.int32)
    out = experts(rows, weight, sizes, ExpertWeights(gate_up, down), "swiglu", False)
    y = np.asarray(out).reshape(3, 6, 7).sum(0)
    wide = np.concatenate(list(gate_up[:3]), axis=2).astype(np.float64)
    gate, up = x @ wide[:, 0], x @ wide[:, 1]
    want = (gate / (1 + np.exp(-gate)) * up) @ np.concatenate(list(down[:3]), axis=0)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
