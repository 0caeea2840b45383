"""What a step reports of its routing, against NumPy: sums of a summary, pairs of ranks, and how the bias follows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from jax.sharding import Mesh, PartitionSpec

from moejax.axes import AXES, TOKEN_AXES
from moejax.config import LayerGroup, LayerSpec, LogConfig, LossConfig, MoEConfig
from moejax.moe.balance import moved_bias
from moejax.moe.statistics import Statistics, pair_matrix, summarize

N = 8


def test_moved_bias_equals_numpy():
    counts = jnp.asarray([[4, 1, 1], [2, 2, 2]])
    moved = moved_bias(jnp.zeros((2, 3)), counts, 0.5)
    sign = np.asarray([-1, 1, 1])
    np.testing.assert_allclose(moved, np.stack([0.5 * (sign - sign.mean()), np.zeros(3)]), rtol=1e-6)


def test_training_step_moves_the_bias_by_the_load_of_the_whole_batch():
    """The load of a layer moves the bias of that layer and of no other, also behind groups without MoE layers.

    Requested and kept routes and pairs of ranks are those of the whole step, of two microbatches.
    """
    dense, moe = LayerSpec("dense"), LayerSpec("moe")
    layers = (LayerGroup(1, (dense,)), LayerGroup(2, (dense, moe)))
    m = dataclasses.replace(tiny.MODEL.moe, selection_bias=True, shared_dim=0)
    model = dataclasses.replace(tiny.MODEL, layers=layers, moe=m)
    sections: dict[str, Any] = {"loss": LossConfig(balance_weight=0.0, bias_rate=0.02), "log": LogConfig(pairs=True)}
    run = tiny.config(2, 2, 2, model=model, moe=MoEConfig(capacity=1.0), **sections)
    program = tiny.program(run)
    state, batch = program.init(0), tiny.batch(run)
    state, metrics = program.train_step(state, program.put(batch))
    got = state.params["groups_1"]["1"]["ffn"]["selection_bias"]
    requested = np.asarray(metrics["moe/requested"], np.float64)
    assert requested.sum() == 2 * m.top_k * int(metrics["tokens"])
    assert len({tuple(row) for row in requested}) == 2
    sign = np.sign(requested.mean(1, keepdims=True) - requested)
    np.testing.assert_allclose(got, 0.02 * (sign - sign.mean(1, keepdims=True)), rtol=1e-5)
    assert not any(np.asarray(leaf).any() for leaf in moments_of_bias(state.opt_state))
    kept = np.asarray(metrics["moe/kept"])
    assert (kept <= requested).all()
    np.testing.assert_allclose(1 - kept.sum() / requested.sum(), metrics["moe/dropped_fraction"], rtol=1e-5)
    assert 0 < metrics["moe/dropped_fraction"] < 0.5
    pairs = np.asarray(metrics["moe/pairs"])
    np.testing.assert_array_equal(pairs.sum(1), requested.reshape(2, 2, -1).sum(-1))  # of destinations
    sources = (batch["segments"] > 0).sum(1).reshape(2, 2, -1).sum((0, 2))  # rows lie over data, then expert
    np.testing.assert_array_equal(pairs.sum(2), np.tile(m.top_k * sources, (2, 1)))


def moments_of_bias(opt_state) -> list:
    """Optimizer state of the selection biases: it stays zero, so the optimizer moves none of them."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    found = [leaf for path, leaf in leaves if "selection_bias" in jax.tree_util.keystr(path)]
    assert found
    return found


def test_router_and_bias_are_float32_whatever_the_model_computes_in():
    moe = dataclasses.replace(
        tiny.MODEL.moe, selection_bias=True, router_bias=True, router_scale=True, expert_bias=True
    )
    model = dataclasses.replace(tiny.MODEL, dtype="bfloat16", moe=moe)
    ffn = tiny.program(tiny.config(model=model)).layouts["groups_1"]["0"]["ffn"]
    kept = {name: layout.dtype(jnp.dtype(jnp.bfloat16)) for name, layout in ffn.items() if name != "shared"}
    router = ("router", "router_bias", "router_scale", "selection_bias")
    experts = ("gate_up", "down", "gate_up_bias", "down_bias")
    assert kept == dict.fromkeys(router, jnp.float32) | dict.fromkeys(experts, jnp.bfloat16)


def test_summary_equals_numpy():
    rng = np.random.default_rng(0)
    requested: Any = rng.integers(0, 50, (3, N)).astype(np.int32)
    requested[1, 2] = 0
    kept: Any = np.minimum(requested, 30).astype(np.int32)
    sums: dict[str, Any] = {
        name: rng.integers(1, 9, 3).astype(np.int32) for name in ("lost_one", "lost_all", "sent", "saved")
    }
    sums |= {name: rng.random(3).astype(np.float32) for name in ("weight_sum", "removed_sum", "margin_sum")}
    zero: Any = np.zeros(3, np.float32)
    total = jax.tree.map(jnp.asarray, Statistics(requested, kept, zero, zero, zero, **sums))
    got = summarize(total, jnp.int32(100), 2, 2 * 64, drops=True)
    assert got.keys() - summarize(total, jnp.int32(100), 2, 2 * 64, drops=False).keys() == {"moe/kept"}
    ratio = lambda c: (c.max(1) / c.mean(1)).max()  # noqa: E731
    share = requested / requested.sum(1, keepdims=True)
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(1)
    want = {
        "requested_max_over_mean": ratio(requested),
        "kept_max_over_mean": ratio(kept),
        "requested_rank_max_over_mean": ratio(requested.reshape(3, 2, -1).sum(-1)),
        "kept_rank_max_over_mean": ratio(kept.reshape(3, 2, -1).sum(-1)),
        "entropy_imbalance": (1 - entropy / np.log(N)).max(),
        "dropped_fraction": 1 - kept.sum() / requested.sum(),
        "tokens_losing_one": sums["lost_one"].sum() / 300,
        "tokens_losing_all": sums["lost_all"].sum() / 300,
        "weight_removed": sums["removed_sum"].sum() / sums["weight_sum"].sum(),
        "margin": sums["margin_sum"].sum() / 300,
        "dead_experts": (requested == 0).sum(),
        "bytes_sent": 2 * 64 * sums["sent"].sum(),
        "bytes_saved": 2 * 64 * sums["saved"].sum(),
        "requested": requested,
        "kept": kept,
    }
    assert got.keys() == {f"moe/{name}" for name in want}
    for name, value in want.items():
        np.testing.assert_allclose(got[f"moe/{name}"], value, rtol=1e-5, err_msg=name)


def test_pairs_of_ranks_add_up_over_devices_at_the_same_place():
    rng = np.random.default_rng(0)
    sizes = {"data": 2, "context": 2, "expert": 2}
    mesh = Mesh(np.asarray(jax.devices()).reshape([sizes.get(axis, 1) for axis in AXES]), AXES)
    requested = rng.integers(0, 9, (8, 3, N)).astype(np.int32)  # of 8 devices, 3 layers

    def matrix(ranks: int, axes: tuple[str, ...]):
        f = lambda a: pair_matrix(a[0], ranks, axes)  # noqa: E731
        spec = PartitionSpec(TOKEN_AXES)
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=PartitionSpec()))(requested)

    by_place = requested.reshape(2, 2, 2, 3, N)  # data, context, expert
    for axes, sources in (
        (("expert",), by_place.sum((0, 1))),
        (("context", "expert"), by_place.sum(0).reshape(4, 3, N)),
    ):
        want = sources.reshape(*sources.shape[:2], len(sources), -1).sum(-1).transpose(1, 0, 2)
        np.testing.assert_array_equal(matrix(len(sources), axes), want)
