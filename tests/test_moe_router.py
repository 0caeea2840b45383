"""Scores, choice and merge rules against NumPy, one token at a time; activations; moving of rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from moejax.config import MoEConfig, MoEModelConfig, RematConfig
from moejax.errors import UserError
from moejax.moe import rows
from moejax.moe.experts import ExpertWeights, experts
from moejax.moe.router import RouterWeights, noise, route
from moejax.moe.rows import inverse, sum_rows, take_rows

T, D, E = 20, 6, 12
BASE = MoEModelConfig(num_experts=E, top_k=3)
CASES = {
    "softmax": {},
    "raw": {"merge": "raw"},
    "softmax after the choice, biased": {"softmax": "after", "selection_bias": True},
    "sigmoid, biased, scaled": {"scores": "sigmoid", "selection_bias": True, "routed_scale": 2.5},
    "sqrt softplus to K": {"scores": "sqrt_softplus", "merge": "sum_to_k"},
    "groups": {"scores": "sigmoid", "num_groups": 4, "top_groups": 2, "selection_bias": True},
    "router bias and scale": {"router_bias": True, "router_scale": True},
}


def numpy_route(x, w: RouterWeights, m: MoEModelConfig):
    """One token in float64: chosen experts, weights, normalised scores."""
    z = (x * (1 if w.scale is None else np.float64(w.scale))) @ np.float64(w.router)
    z = z + (0 if w.bias is None else np.float64(w.bias))
    soft = np.exp(z) / np.exp(z).sum()
    score = {"softmax": soft, "sigmoid": 1 / (1 + np.exp(-z)), "sqrt_softplus": np.sqrt(np.log1p(np.exp(z)))}[m.scores]
    ranked = (z if m.softmax == "after" else score) + (0 if w.selection is None else np.float64(w.selection))
    if m.num_groups > 1:
        size = m.num_experts // m.num_groups
        quality = [np.sort(ranked[g * size : (g + 1) * size])[-2:].sum() for g in range(m.num_groups)]
        best = sorted(range(m.num_groups), key=lambda g: (-quality[g], g))[: m.top_groups]
        ranked = np.where([e // size in best for e in range(m.num_experts)], ranked, -np.inf)
    chosen = sorted(range(m.num_experts), key=lambda e: (-ranked[e], e))[: m.top_k]
    weight = soft[chosen] / soft[chosen].sum() if m.softmax == "after" else score[chosen]
    if m.merge != "raw":
        weight = weight / weight.sum()
    weight = weight * m.routed_scale * (m.top_k if m.merge == "sum_to_k" else 1)
    return chosen, weight, score / score.sum(), np.log(np.exp(z).sum())


@pytest.mark.parametrize("case", CASES)
def test_route_equals_numpy(case):
    m = dataclasses.replace(BASE, **CASES[case])
    rng = np.random.default_rng(3)
    draw: Any = lambda *s: rng.standard_normal(s).astype(np.float32)  # noqa: E731
    w = RouterWeights(
        draw(D, E),
        draw(E) if m.router_bias else None,
        draw(D) if m.router_scale else None,
        draw(E) / 2 if m.selection_bias else None,
    )
    x, valid = draw(T, D), np.arange(T) % 5 != 0
    got = jax.device_get(route(x, valid, w, m))
    for t in range(T):
        chosen, weight, score, lse = numpy_route(x[t].astype(np.float64), w, m)
        if valid[t]:
            np.testing.assert_array_equal(got.expert_TK[t], chosen)
            np.testing.assert_allclose(got.weight_TK[t], weight, rtol=2e-5)
            np.testing.assert_allclose(got.score_TE[t], score, rtol=2e-5, atol=1e-7)
            np.testing.assert_allclose(got.logsumexp_T[t], lse, rtol=2e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(got.expert_TK[t], [E] * 3)
            assert not got.weight_TK[t].any()
            assert got.margin_T[t] == 0


def test_ties_go_to_the_lower_expert_and_margin_is_zero():
    got = route(jnp.ones((2, D)), jnp.ones(2, bool), RouterWeights(jnp.zeros((D, E))), BASE)
    np.testing.assert_array_equal(got.expert_TK, [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(got.margin_T, [0, 0])


@pytest.mark.parametrize("groups", [1, 4])
def test_cpu_chooses_without_a_sort(groups):
    """XLA:CPU makes one call of a top-k that is read whole, and sorts all scores of a token for one that is cut."""
    model = MoEModelConfig(num_experts=64, top_k=4, num_groups=groups, top_groups=min(2, groups))
    x, router = jnp.ones((32, 8)), RouterWeights(jnp.ones((8, 64)))
    text = jax.jit(lambda x: route(x, jnp.ones(32, bool), router, model)).lower(x).compile().as_text() or ""
    assert "TopK" in text
    assert " sort(" not in text


def test_selection_bias_has_no_gradient_and_is_not_in_the_weights():
    m = dataclasses.replace(BASE, selection_bias=True, scores="sigmoid")
    x, w = jnp.ones((4, D)), jnp.asarray(np.random.default_rng(0).standard_normal((D, E)), jnp.float32)
    f = lambda b: jnp.sum(jnp.square(route(x, jnp.ones(4, bool), RouterWeights(w, selection=b), m).weight_TK))  # noqa: E731
    np.testing.assert_array_equal(jax.grad(f)(jnp.linspace(0, 1, E)), np.zeros(E))
    same = jnp.full(E, 7.0)  # moves no choice, so nothing at all
    np.testing.assert_array_equal(f(same), f(jnp.zeros(E)))


def test_forced_routing_is_uniform_or_random_and_keeps_the_router_gradient():
    x, w = jnp.asarray(np.random.default_rng(0).standard_normal((48, D)), jnp.float32), jnp.ones((D, E)).at[:, 0].set(9)
    even = route(x, jnp.ones(48, bool), RouterWeights(w), BASE, "uniform")
    np.testing.assert_array_equal(np.bincount(np.ravel(even.expert_TK), minlength=E), [12] * E)
    drawn = route(x, jnp.ones(48, bool), RouterWeights(w), BASE, "random")
    counts = np.bincount(np.ravel(drawn.expert_TK), minlength=E)
    assert counts.min() > 0
    assert len(set(counts)) > 1
    assert all(len(set(row)) == 3 for row in np.asarray(drawn.expert_TK).tolist())


ACTIVATIONS = {
    "swiglu": lambda g, u: g / (1 + np.exp(-g)) * u,
    "geglu": lambda g, u: 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u,
    "clamped_swiglu": lambda g, u: np.minimum(g, 7) / (1 + np.exp(-1.702 * np.minimum(g, 7))) * (np.clip(u, -7, 7) + 1),
    "relu2": lambda g, u: np.maximum(u, 0) ** 2,
}


@pytest.mark.parametrize(
    ("activation", "on_input"), [("swiglu", True), ("geglu", False), ("clamped_swiglu", False), ("relu2", False)]
)
def test_experts_equal_numpy_with_biases_and_nan_in_the_tail(activation, on_input):
    rng, inner, width = np.random.default_rng(5), 1 if activation == "relu2" else 2, 5
    draw: Any = lambda *s: rng.standard_normal(s).astype(np.float32) * 2  # noqa: E731
    w = ExpertWeights(draw(3, D, inner, width), draw(3, width, D), draw(3, inner * width), draw(3, D))
    x, weight, sizes = draw(9, D), rng.random(9).astype(np.float32), jnp.asarray([4, 0, 3])
    x[7:], weight[7:] = np.nan, np.nan
    cotangent = draw(9, D)

    def loss(x, weight, w):
        y = experts(x, weight, sizes, w, activation, on_input)
        return jnp.sum(y * cotangent), y

    def dense(x, weight, w):
        """The same for the first seven rows, without any grouping."""
        total, ys = 0.0, []
        for r, e in enumerate([0] * 4 + [2] * 3):
            row = x[r] * (weight[r] if on_input else 1)
            pre = [row @ w.gate_up[e, :, g] + w.gate_up_bias[e, g * width : (g + 1) * width] for g in range(inner)]
            numpy = jnp if isinstance(row, jax.Array) else np
            hidden = (
                _jax_activation(activation, pre[0], pre[-1])
                if numpy is jnp
                else ACTIVATIONS[activation](pre[0], pre[-1])
            )
            ys.append((hidden @ w.down[e] + w.down_bias[e]) * (1 if on_input else weight[r]))
            total = total + (ys[-1] * cotangent[r]).sum()
        return total, ys

    (_, y), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(x, weight, w)
    _, want = dense(x.astype(np.float64), weight.astype(np.float64), w)
    np.testing.assert_allclose(y[:7], want, rtol=3e-5, atol=3e-5)
    assert not np.asarray(y[7:]).any()
    with jax.numpy_dtype_promotion("standard"):
        want_grads = jax.jit(jax.grad(lambda *a: dense(*a)[0], argnums=(0, 1, 2)))(
            *jax.tree.map(jnp.asarray, (x, weight, w))
        )
    for got, wanted in zip(jax.tree.leaves(grads[2]), jax.tree.leaves(want_grads[2]), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
        assert not np.asarray(got[1]).any()  # the expert without rows
    for got, wanted in zip(grads[:2], want_grads[:2], strict=True):
        np.testing.assert_allclose(got[:7], wanted[:7], rtol=1e-4, atol=1e-4)


def _jax_activation(name, g, u):
    match name:
        case "swiglu":
            return g / (1 + jnp.exp(-g)) * u
        case "geglu":
            return 0.5 * g * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u
        case "clamped_swiglu":
            g = jnp.minimum(g, 7)
            return g / (1 + jnp.exp(-1.702 * g)) * (jnp.clip(u, -7, 7) + 1)
    return jnp.maximum(u, 0) ** 2


def test_moving_rows_is_adjoint_and_ignores_unwritten_ones(monkeypatch):
    monkeypatch.setattr(rows, "UNWRITTEN", np.nan)
    rng = np.random.default_rng(2)
    users: Any = np.asarray([[0, 4], [-1, 2], [-1, -1], [5, -1]], np.int32)  # of 4 input rows, in 6 output rows
    index: Any = np.full(6, -1, np.int32)
    for i, n in np.argwhere(users >= 0):
        index[users[i, n]] = i
    x, y = rng.standard_normal((4, 3)).astype(np.float32), rng.standard_normal((6, 3)).astype(np.float32)
    taken, back = jax.vjp(lambda x: take_rows(x, index, users), x)
    used = index >= 0
    np.testing.assert_array_equal(taken[used], x[index[used]])
    assert np.isnan(taken[~used]).all()
    dense = np.zeros((6, 4), np.float32)
    dense[np.flatnonzero(used), index[used]] = 1
    y[~used] = np.nan  # gradient of rows that nobody reads
    want = dense.T @ np.nan_to_num(y)
    np.testing.assert_allclose(back(y)[0], want, rtol=1e-6)
    total, back = jax.vjp(lambda y: sum_rows(y, users, index), y)
    np.testing.assert_allclose(total, want, rtol=1e-6)
    np.testing.assert_array_equal(back(x)[0][used], x[index[used]])
    np.testing.assert_array_equal(inverse(users, 6), [0, -1, 3, -1, 1, 6])


def test_jitter_is_uniform_noise_that_repeats():
    rng = np.random.default_rng(0)
    x = np.asarray(rng.standard_normal((4096, 32)), np.float32)
    got = np.asarray(noise(jnp.asarray(x)), np.float64)
    assert -1 <= got.min() < -0.999
    assert 0.999 < got.max() < 1
    np.testing.assert_allclose(got.mean(0), 0, atol=5 * (1 / 3 / 4096) ** 0.5)
    np.testing.assert_allclose(np.square(got).mean(0), 1 / 3, atol=5 * (4 / 45 / 4096) ** 0.5)
    assert np.abs(np.corrcoef(got.T) - np.eye(32)).max() < 5 / 4096**0.5
    assert np.abs(np.corrcoef(got[:256]) - np.eye(256)).max() < 6.5 / 32**0.5
    x[1::2] = x[::2]
    x[1::2, 7] = np.nextafter(x[::2, 7], np.float32(9))  # another value in its last bit: all else is new
    again = np.asarray(noise(jnp.asarray(x)), np.float64)
    np.testing.assert_array_equal(again[::2], got[::2])
    assert abs(np.mean(again[::2] * again[1::2])) < 5 * (1 / 9 / 2048 / 32) ** 0.5


def test_jitter_multiplies_what_the_router_reads():
    rng = np.random.default_rng(1)
    x, router = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((T, D), (D, E)))
    valid, factor = jnp.ones(T, bool), 1 + 0.3 * noise(x)

    def weights(x: jax.Array, jitter: float) -> jax.Array:
        return route(x, valid, RouterWeights(router), BASE, jitter=jitter).weight_TK

    got, pull = jax.vjp(lambda x: weights(x, 0.3), x)
    want, pull_want = jax.vjp(lambda x: weights(x * factor, 0.0), x)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(pull(jnp.sin(got))[0], pull_want(jnp.sin(got))[0], atol=1e-6)
    assert np.abs(np.asarray(got - weights(x, 0.0))).max() > 1e-3


def test_jitter_is_in_training_alone():
    run = tiny.config(moe=MoEConfig(jitter=0.1), remat=RematConfig("none"))
    program = tiny.program(run)
    args = program.abstract_state.params, program.abstract_batch
    constant = str(0x85EBCA6B)
    assert constant in str(jax.make_jaxpr(program.gradients)(*args))
    assert constant not in str(jax.make_jaxpr(program.eval_step)(*args))
    with pytest.raises(UserError, match=r"moe.jitter=0.1: must be 0, or set remat.policy=none"):
        tiny.config(moe=MoEConfig(jitter=0.1), remat=RematConfig("full"))
    with pytest.raises(UserError, match=r"moe.jitter=1.0"):
        MoEConfig(jitter=1.0)
