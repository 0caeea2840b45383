"""Balance and z-loss of every scope, on meshes and microbatches, against NumPy; the bias controller; the alarm."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec

from moejax.axes import BATCH_AXES, CONTEXT, TOKEN_AXES
from moejax.config import LayerGroup, LayerSpec, LossConfig, MoEModelConfig
from moejax.model.decoder import Sums
from moejax.moe.balance import moved_bias, sequence_sum, z_loss_sum
from moejax.moe.router import RouterWeights, route
from moejax.moe.statistics import Statistics, count_experts, summarize
from moejax.schedule.sequential import accumulate
from moejax.sharding import make_mesh
from moejax.train.objective import with_balance
from moejax.train.step import _requested_of_step
from moejax.varying import vary

N, K, D, ROWS, LENGTH = 8, 2, 5, 16, 6
MODEL = MoEModelConfig(num_experts=N, top_k=K)


def arrays() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, LENGTH, D)).astype(np.float32)
    x += np.linspace(-1, 1, ROWS)[:, None, None].astype(np.float32)  # rows differ, so that scopes do
    valid = rng.random((ROWS, LENGTH)) > 0.3
    valid[3] = False
    return x, valid, rng.standard_normal((D, N)).astype(np.float32)


def device_value(scope: Any, data: int, expert: int, microbatches: int):
    """Loss, and gradient of the router, as the training step makes them."""
    loss_config = LossConfig(balance_scope="sequence" if scope == "z" else scope)
    run = tiny.config(data, expert, microbatches=2, loss=loss_config)  # one refuses scopes of several
    x, valid, router = arrays()

    def forward(router, micro):
        flat = micro["valid"].reshape(-1) > 0
        chosen = route(micro["x"].reshape(-1, D), flat, RouterWeights(router), MODEL)
        zero = jnp.zeros((1,), jnp.float32)
        score = jnp.sum(jnp.where(flat[:, None], chosen.score_TE, 0.0), axis=0)
        statistics = Statistics(*[zero] * 12)._replace(
            requested_E=count_experts(chosen.expert_TK, N)[None],
            score_E=score[None],
            balance_sum=sequence_sum(chosen, micro["valid"] > 0)[None],
            z_sum=z_loss_sum(chosen, flat)[None],
        )
        return Sums(jnp.float32(0), statistics)

    def body(router, x, valid):
        tokens = jax.lax.psum(jnp.sum(valid), TOKEN_AXES)
        micro = {name: a.reshape(microbatches, -1, *a.shape[1:]) for name, a in (("x", x), ("valid", valid))}
        router = vary(router, TOKEN_AXES)
        step = _requested_of_step(forward, router, micro) if scope == "global_batch" and microbatches > 1 else None

        def loss_fn(router, micro, before):
            earlier = None if before is None else before.statistics.requested_E
            sums = with_balance(forward(router, micro), earlier, step, run)
            s: Any = sums.statistics
            loss = s.z_sum[0] / tokens if scope == "z" else s.balance_sum[0] / tokens
            return loss, vary(sums, TOKEN_AXES)

        grads, sums = accumulate(loss_fn, router, micro)
        s = sums.statistics
        value = (s.z_sum if scope == "z" else s.balance_sum)[0] / tokens
        return jax.lax.psum(value, TOKEN_AXES), jax.lax.psum(grads, TOKEN_AXES)

    mesh = make_mesh(run.mesh, jax.devices()[: run.mesh.size])
    spec = PartitionSpec(BATCH_AXES, CONTEXT)
    f = jax.shard_map(
        body, mesh=mesh, in_specs=(PartitionSpec(), spec, spec), out_specs=PartitionSpec(), check_vma=True
    )
    return jax.device_get(jax.jit(f)(router, x, valid.astype(np.float32)))


def numpy_value(scope: str, devices: int, microbatches: int):
    """The same, token by token in float64: dz = N / T p (f - f.p) with the f of the token's scope."""
    x, valid, router = (a.astype(np.float64) for a in arrays())
    z = x @ router
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    tokens = valid.sum()
    if scope == "z":
        lse = np.log(np.exp(z).sum(-1))
        dz = (2 * lse * valid)[..., None] * p / tokens
        return (lse**2 * valid).sum() / tokens, np.einsum("bsd,bse->de", x, dz)
    chosen = np.argsort(-p, axis=-1)[..., :K]
    counts = (np.eye(N)[chosen].sum(-2) * valid[..., None]).sum(1)  # of each row
    row = np.arange(ROWS)
    device, micro = row // (ROWS // devices), row % (ROWS // devices) // (ROWS // devices // microbatches)
    same = {
        "sequence": lambda r: row == r,
        "local": lambda r: (device == device[r]) & (micro == micro[r]),
        "synchronized": lambda r: micro == micro[r],
        "accumulated": lambda r: micro <= micro[r],
        "global_batch": lambda r: row >= 0,
    }[scope]
    loss, dz = 0.0, np.zeros_like(z)
    for r in range(ROWS):
        c = counts[same(r)].sum(0)
        f = c / max(c.sum(), 1)
        loss += N * (valid[r][:, None] * p[r] * f).sum() / tokens
        dz[r] = N / tokens * valid[r][:, None] * p[r] * (f - (p[r] @ f)[:, None])
    return loss, np.einsum("bsd,bse->de", x, dz)


LAYOUTS = [(1, 1, 1), (2, 4, 1), (1, 2, 4)]
SCOPES = ("sequence", "local", "synchronized", "accumulated", "global_batch", "z")


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
@pytest.mark.parametrize("scope", SCOPES)
def test_scopes_equal_numpy(scope, layout):
    data, expert, microbatches = layout
    loss, grad = device_value(scope, data, expert, microbatches)
    want, want_grad = numpy_value(scope, data * expert, microbatches)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(grad, want_grad, rtol=1e-4, atol=1e-6)


def test_which_scopes_promise_the_same_on_every_mesh():
    """The oracle itself: the values that are to be equal are, and the others differ, so the test above can fail."""
    for scope in SCOPES:
        values = {round(numpy_value(scope, d * e, m)[0], 6) for d, e, m in [*LAYOUTS, (8, 1, 2)]}
        assert (len(values) == 1) == (scope in ("sequence", "global_batch", "z")), (scope, values)


def test_bias_controller_balances_a_skewed_router_without_a_loss():
    rng = np.random.default_rng(0)
    m = dataclasses.replace(MODEL, scores="sigmoid", selection_bias=True)
    x: Any = rng.standard_normal((512, D)).astype(np.float32) + 1
    router: Any = (0.1 * rng.standard_normal((D, N))).astype(np.float32)
    router[:, 0] += 1  # nearly every token wants expert 0
    valid = jnp.ones(512, bool)

    @jax.jit
    def step(bias):
        chosen = route(x, valid, RouterWeights(router, selection=bias), m)
        counts = count_experts(chosen.expert_TK, N)
        return moved_bias(bias, counts, 0.005), counts

    bias, loads = jnp.zeros(N), []
    for _ in range(150):
        bias, counts = jax.device_get(step(bias))
        loads.append(np.max(counts) / np.mean(counts))
    assert loads[0] > 3.9  # of at most N / K = 4
    assert max(loads[120:]) < 1.3
    np.testing.assert_allclose(np.mean(bias), 0, atol=1e-6)


def test_moved_bias_equals_numpy():
    counts = jnp.asarray([[4, 1, 1], [2, 2, 2]])
    moved = moved_bias(jnp.zeros((2, 3)), counts, 0.5)
    sign = np.asarray([-1, 1, 1])
    np.testing.assert_allclose(moved, np.stack([0.5 * (sign - sign.mean()), np.zeros(3)]), rtol=1e-6)


def test_training_step_moves_the_bias_by_the_load_of_the_whole_batch():
    """The load of a layer moves the bias of that layer and of no other, also behind groups without MoE layers."""
    dense, moe = LayerSpec("dense"), LayerSpec("moe")
    layers = (LayerGroup(1, (dense,)), LayerGroup(2, (dense, moe)))
    m = dataclasses.replace(tiny.MODEL.moe, selection_bias=True, shared_dim=0)
    model = dataclasses.replace(tiny.MODEL, layers=layers, moe=m)
    run = tiny.config(2, 1, 2, model=model, loss=LossConfig(balance_weight=0.0, bias_rate=0.02))
    program = tiny.program(run)
    state = program.init(0)
    state, metrics = program.train_step(state, program.put(tiny.batch(run)))
    got = state.params["groups_1"]["1"]["ffn"]["selection_bias"]
    requested = np.asarray(metrics["moe/requested"], np.float64)
    assert requested.sum() == 2 * m.top_k * int(metrics["tokens"])
    assert len({tuple(row) for row in requested}) == 2
    sign = np.sign(requested.mean(1, keepdims=True) - requested)
    np.testing.assert_allclose(got, 0.02 * (sign - sign.mean(1, keepdims=True)), rtol=1e-5)
    assert not any(np.asarray(leaf).any() for leaf in moments_of_bias(state.opt_state))


def moments_of_bias(opt_state) -> list:
    """Optimizer state of the selection biases: it stays zero, so the optimizer moves none of them."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    found = [leaf for path, leaf in leaves if "selection_bias" in jax.tree_util.keystr(path)]
    assert found
    return found


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
    total = Statistics(requested, kept, zero, zero, zero, **sums)
    got = summarize(jax.tree.map(jnp.asarray, total), jnp.int32(100), 2, 2 * 64)
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
    }
    assert got.keys() == {f"moe/{name}" for name in want}
    for name, value in want.items():
        np.testing.assert_allclose(got[f"moe/{name}"], value, rtol=1e-5, err_msg=name)
