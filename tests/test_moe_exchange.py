"""Every exchange against a dense loop over experts, with skewed loads and with NaN in every unwritten row."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec
from moe_oracle import admitted, assert_close, dense_layer

from moejax.config import Config, ContextConfig, DataConfig, MeshConfig, MoEConfig, MoEModelConfig
from moejax.moe import rows
from moejax.moe.admission import Capacity
from moejax.moe.exchange import make_exchange
from moejax.moe.experts import ExpertWeights
from moejax.moe.layer import moe_layer
from moejax.moe.router import RouterWeights, route
from moejax.sharding import make_mesh

E, D, F, ROWS, LENGTH = 16, 12, 10, 8, 7
LOADS = ("even", "one expert", "empty ranks", "one rank", "padding", "nothing")


def data(load: str) -> dict:
    """Arrays of one load: what the router sees makes the skew."""
    rng = np.random.default_rng(LOADS.index(load))
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    bias, valid = np.zeros(E, np.float32), np.ones((ROWS, LENGTH), bool)
    if load == "one expert":
        bias[11] = 3.5
    if load == "empty ranks":
        bias[: E // 2] = -3.5
    if load == "one rank":
        bias[2:4] = 3.5
    if load == "padding":
        valid = rng.random((ROWS, LENGTH)) > 0.6
        valid[1] = False
    if load == "nothing":
        valid[:] = False
    x = draw(ROWS, LENGTH, D)
    x[~valid] = 1e4 * draw(ROWS, LENGTH, D)[~valid]  # padding holds anything
    weights = {"router": draw(D, E) / 8, "bias": bias, "gate_up": draw(E, D, 2, F) / 4, "down": draw(E, F, D) / 4}
    return {"x": x, "valid": valid, "cotangent": draw(ROWS, LENGTH, D), **weights}


def run_config(exchange: Any, ranks: int, top_k: int, fold: int = 1, **moe) -> Config:
    """A layer on `ranks` expert ranks, of which `fold` lie along the context axis."""
    merge = "raw" if top_k == 1 else "sum_to_one"  # one weight that is always one has no gradient
    model = MoEModelConfig(num_experts=E, top_k=top_k, expert_dim=F, router_bias=True, merge=merge)
    axes = ("context", "expert") if fold > 1 else ("expert",)
    return Config(
        mesh=MeshConfig(context=fold, expert=ranks // fold),
        model=dataclasses.replace(tiny.MODEL, moe=model),
        moe=MoEConfig(exchange, expert_axes=axes, **moe),
        context=ContextConfig("ring" if fold > 1 else "ulysses"),
        data=DataConfig(batch_size=ROWS),
    )


def layer_function(config: Config, inner=lambda x: x):
    """Jitted: output, gradients, choice, weights, kept routes and statistics over a mesh of ranks."""
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.size])
    split, one = PartitionSpec(config.moe.expert_axes), PartitionSpec()
    specs = {
        "x": split,
        "valid": split,
        "cotangent": split,
        "router": one,
        "bias": one,
        "gate_up": split,
        "down": split,
    }
    exchange = make_exchange(config)

    def body(a):
        def loss(p):
            router = RouterWeights(p["router"], p["bias"])
            weights = ExpertWeights(p["gate_up"], p["down"])
            y, statistics = moe_layer(p["x"], inner(p["x"]), a["valid"], router, weights, config, exchange)
            return jnp.sum(y * a["cotangent"]), (y, statistics)

        (_, (y, statistics)), grads = jax.value_and_grad(loss, has_aux=True)(
            {k: a[k] for k in specs if k not in ("valid", "cotangent")}
        )
        router = RouterWeights(a["router"], a["bias"])
        chosen = route(a["x"].reshape(-1, D), a["valid"].reshape(-1), router, config.model.moe)
        plan = exchange.plan(chosen.expert_TK, chosen.weight_TK)
        lead = lambda v: v[None]  # noqa: E731
        facts = {"expert": chosen.expert_TK, "weight": chosen.weight_TK, "kept": plan.kept_TK, "sizes": plan.sizes_e}
        return y, grads, jax.tree.map(lead, facts), jax.lax.psum(statistics, config.moe.expert_axes)

    out_specs = split, {k: specs[k] for k in specs if k not in ("valid", "cotangent")}, split, one
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=True))


ORACLES: dict = {}


def oracle(config: Config, a: dict, expert, kept):
    key = config.model.moe.top_k, config.moe.renormalize_dropped
    if key not in ORACLES:

        def run(p, valid, kept, expert, cotangent):
            flat = p["x"].reshape(-1, D)

            def loss(p):
                y = dense_layer(p["x"].reshape(-1, D), valid.reshape(-1), kept, expert, p, config)
                return (y * cotangent.reshape(-1, D)).sum()

            return dense_layer(flat, valid.reshape(-1), kept, expert, p, config), jax.grad(loss)(p)

        ORACLES[key] = jax.jit(run)
    p = {k: a[k] for k in ("x", "router", "bias", "gate_up", "down")}
    p["x"] = np.where(a["valid"][..., None], p["x"], 0)  # exp in the oracle overflows on padding
    return ORACLES[key](p, a["valid"], kept, expert, a["cotangent"])


def check(monkeypatch, exchange: str, ranks: int, top_k: int, loads=LOADS, fold: int = 1, **moe) -> None:
    monkeypatch.setattr(rows, "UNWRITTEN", np.nan)
    config = run_config(exchange, ranks, top_k, fold, **moe)
    function = layer_function(config)
    capacity = Capacity(config.moe.capacity, config.moe.capacity_per == "expert", config.moe.drop_order == "weight")
    for load in loads:
        a = data(load)
        y, grads, facts, statistics = jax.device_get(function(a))
        kept = admitted(facts["expert"], facts["weight"], E, capacity, exchange)
        np.testing.assert_array_equal(facts["kept"], kept)
        expert, flat_kept = facts["expert"].reshape(-1, top_k), kept.reshape(-1, top_k)
        counts = np.bincount(expert[flat_kept], minlength=E)
        np.testing.assert_array_equal(facts["sizes"].reshape(-1), counts)
        np.testing.assert_array_equal(statistics.kept_E, counts)
        requested = np.bincount(expert.reshape(-1), minlength=E + 1)[:E]
        np.testing.assert_array_equal(statistics.requested_E, requested)
        lost = (expert < E) & ~flat_kept
        assert statistics.lost_one == lost.any(1).sum()
        assert statistics.lost_all == (lost.any(1) & ~flat_kept.any(1)).sum()
        weight = facts["weight"].reshape(-1, top_k)
        np.testing.assert_allclose(statistics.removed_sum, weight[lost].sum(), rtol=1e-5, atol=1e-6)
        _check_wire(exchange, ranks, config, facts, kept, statistics)
        want_y, want = jax.device_get(oracle(config, a, expert, flat_kept))
        assert_close(y.reshape(-1, D), want_y, f"{load}: y")
        for name, value in want.items():
            assert_close(grads[name], value, f"{load}: d{name}", name in ("gate_up", "down"))
        for name in ("gate_up", "down"):
            assert not grads[name][counts == 0].any()
        assert not grads["x"][~a["valid"]].any()
        assert not y[~a["valid"]].any()


def _check_wire(exchange, ranks, config, facts, kept, statistics) -> None:
    """Rows between devices: of `ragged` counted one by one, of the others their slots, full or not."""
    local, tokens, top_k = E // ranks, ROWS // ranks * LENGTH, config.model.moe.top_k
    pairs, routes = set(), 0
    for s, t, k in np.argwhere(kept):
        rank = facts["expert"][s, t, k] // local
        if rank != s:
            routes += 1
            pairs.add((s, t, rank))
    budget, factor = tokens * min(top_k, local), config.moe.capacity
    if factor is not None:
        pools = local if config.moe.capacity_per == "expert" else 1
        budget = min(budget, pools * math.ceil(factor * math.ceil(tokens * top_k / ranks) / pools))
    others = ranks * (ranks - 1)
    sent, without = {
        "local": (0, 0),
        "ragged": (len(pairs), routes),
        "padded": (others * min(budget, tokens), others * budget),
        "gather": (others * tokens, others * tokens),
    }[exchange]
    assert statistics.saved == (without - sent if config.moe.deduplicate else 0)
    assert statistics.sent == (sent if config.moe.deduplicate else without)


# exchange, ranks, top-k, de-duplicated: every value of each with the others
COVER = [
    ("local", 1, 2, False),
    ("padded", 2, 8, True),
    ("padded", 8, 1, False),
    ("ragged", 4, 8, True),
    ("ragged", 8, 2, False),
    ("gather", 4, 2, False),
]
PRODUCT = [
    case
    for case in itertools.product(("local", "padded", "ragged", "gather"), (1, 2, 4, 8), (1, 2, 8), (False, True))
    if not (case[3] and (case[0] in ("local", "gather") or case[2] == 1)) and (case[0] != "local" or case[1] == 1)
]


@pytest.mark.parametrize(("exchange", "ranks", "top_k", "deduplicate"), COVER)
def test_exchange_equals_dense_loop(monkeypatch, exchange, ranks, top_k, deduplicate):
    check(monkeypatch, exchange, ranks, top_k, deduplicate=deduplicate)


@pytest.mark.slow
@pytest.mark.parametrize(("exchange", "ranks", "top_k", "deduplicate"), [c for c in PRODUCT if c not in COVER])
def test_exchange_equals_dense_loop_whole_product(monkeypatch, exchange, ranks, top_k, deduplicate):
    check(monkeypatch, exchange, ranks, top_k, deduplicate=deduplicate)


FOLDED = [
    ("padded", 4, 8, 2, {"deduplicate": True}),
    ("ragged", 8, 2, 2, {"capacity": 0.6}),
    ("gather", 8, 2, 4, {}),
]


@pytest.mark.parametrize(("exchange", "ranks", "top_k", "fold", "moe"), FOLDED)
def test_exchange_over_two_axes_equals_dense_loop(monkeypatch, exchange, ranks, top_k, fold, moe):
    check(monkeypatch, exchange, ranks, top_k, ("even", "one rank", "padding"), fold, **moe)


@pytest.mark.slow
@pytest.mark.parametrize("fold", [2, 4])
@pytest.mark.parametrize(("exchange", "ranks", "top_k", "deduplicate"), [c for c in PRODUCT if c[1] == 8])
def test_exchange_over_two_axes_equals_dense_loop_whole_product(monkeypatch, exchange, ranks, top_k, deduplicate, fold):
    check(monkeypatch, exchange, ranks, top_k, fold=fold, deduplicate=deduplicate)


CAPACITY = [
    ("local", 1, 2, {"capacity_per": "expert", "drop_order": "position"}),
    ("padded", 4, 2, {"drop_order": "weight", "renormalize_dropped": True, "deduplicate": True}),
    ("ragged", 8, 2, {"drop_order": "weight"}),
    ("gather", 4, 2, {"drop_order": "position"}),
]
KINDS = [
    dict(zip(("capacity_per", "drop_order"), kind, strict=True))
    for kind in itertools.product(("rank", "expert"), ("position", "weight"))
]


@pytest.mark.parametrize(("exchange", "ranks", "top_k", "moe"), CAPACITY)
def test_capacity_equals_route_by_route_admission(monkeypatch, exchange, ranks, top_k, moe):
    check(monkeypatch, exchange, ranks, top_k, capacity=0.6, **moe)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("exchange", "ranks", "top_k", "deduplicate"), [c for c in PRODUCT if c[1] in (1, 4)])
def test_capacity_equals_route_by_route_admission_whole_product(monkeypatch, exchange, ranks, top_k, deduplicate, kind):
    check(monkeypatch, exchange, ranks, top_k, capacity=0.6, deduplicate=deduplicate, **kind)
