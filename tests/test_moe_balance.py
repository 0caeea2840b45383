"""Balance and z-loss of every scope, on meshes and microbatches, value and gradient against NumPy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec

from moejax.axes import BATCH_AXES, CONTEXT, TOKEN_AXES
from moejax.config import LossConfig, MoEModelConfig
from moejax.model.decoder import Sums
from moejax.moe.balance import sequence_sum, z_loss_sum
from moejax.moe.router import RouterWeights, route
from moejax.moe.statistics import Statistics, count_experts
from moejax.schedule.sequential import accumulate
from moejax.sharding import make_mesh
from moejax.train.objective import with_balance
from moejax.train.step import _requested_of_step
from moejax.varying import vary

N, K, D, ROWS, LENGTH = 8, 2, 5, 16, 6
MODEL = MoEModelConfig(num_experts=N, top_k=K)
BIASED = dataclasses.replace(MODEL, scores="sigmoid", selection_bias=True, num_groups=4, top_groups=2)
BIAS = np.linspace(-0.4, 0.4, N).astype(np.float32)


def arrays() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, LENGTH, D)).astype(np.float32)
    x += np.linspace(-1, 1, ROWS)[:, None, None].astype(np.float32)  # rows differ, so that scopes do
    valid = rng.random((ROWS, LENGTH)) > 0.3
    valid[3] = False
    return x, valid, rng.standard_normal((D, N)).astype(np.float32)


def device_value(scope: Any, data: int, expert: int, microbatches: int, model: MoEModelConfig = MODEL):
    """Loss, and gradient of the router, as the training step makes them."""
    loss_config = LossConfig(balance_scope="sequence" if scope == "z" else scope)
    whole = dataclasses.replace(tiny.MODEL, moe=model)
    run = tiny.config(data, expert, microbatches=2, loss=loss_config, model=whole)  # one refuses scopes of several
    x, valid, router = arrays()
    selection = jnp.asarray(BIAS) if model.selection_bias else None

    def forward(router, micro):
        flat = micro["valid"].reshape(-1) > 0
        weights = RouterWeights(router, selection=selection)
        chosen = route(micro["x"].reshape(-1, D), flat, weights, model)
        zero = jnp.zeros((1,), jnp.float32)
        score = jnp.sum(jnp.where(flat[:, None], chosen.score_TE, 0.0), axis=0)
        statistics = Statistics(*[zero] * 12)._replace(
            requested_E=count_experts(chosen.expert_TK, N)[None],
            score_E=score[None],
            balance_sum=sequence_sum(chosen, micro["valid"] > 0, scope == "sequence_unbiased")[None],
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


def numpy_choice(s: np.ndarray, scope: str, model: MoEModelConfig) -> np.ndarray:
    """Experts [..., K] that are counted: of the best groups with bias, or of the highest scores alone."""
    if scope == "sequence_unbiased" or not model.selection_bias:
        return np.argsort(-s, axis=-1)[..., :K]
    ranked = (s + BIAS).reshape(*s.shape[:-1], model.num_groups, -1)
    closed = np.argsort(-ranked.sum(-1), axis=-1)[..., model.top_groups :]  # groups of two experts
    ranked[np.eye(model.num_groups, dtype=bool)[closed].any(-2)] = -np.inf
    return np.argsort(-ranked.reshape(s.shape), axis=-1)[..., :K]


def numpy_value(scope: str, devices: int, microbatches: int, model: MoEModelConfig = MODEL):
    """The same, token by token in float64: dz = N / T p (f - f.p) with the f of the token's scope; of sigmoid scores s
    that are divided by their sum, s (1 - s) / sum s stands for p in front."""
    x, valid, router = (a.astype(np.float64) for a in arrays())
    z = x @ router
    s = np.exp(z) if model.scores == "softmax" else 1 / (1 + np.exp(-z))
    p = s / s.sum(-1, keepdims=True)
    slope = p if model.scores == "softmax" else p * (1 - s)
    tokens = valid.sum()
    if scope == "z":
        lse = np.log(np.exp(z).sum(-1))
        dz = (2 * lse * valid)[..., None] * np.exp(z - lse[..., None]) / tokens
        return (lse**2 * valid).sum() / tokens, np.einsum("bsd,bse->de", x, dz)
    counts = (np.eye(N)[numpy_choice(s, scope, model)].sum(-2) * valid[..., None]).sum(1)  # of each row
    row = np.arange(ROWS)
    device, micro = row // (ROWS // devices), row % (ROWS // devices) // (ROWS // devices // microbatches)
    same = {
        "sequence": lambda r: row == r,
        "sequence_unbiased": lambda r: row == r,
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
        dz[r] = N / tokens * valid[r][:, None] * slope[r] * (f - (p[r] @ f)[:, None])
    return loss, np.einsum("bsd,bse->de", x, dz)


LAYOUTS = [(1, 1, 1), (2, 4, 1), (1, 2, 4)]
SCOPES = ("sequence", "local", "synchronized", "accumulated", "global_batch", "z")
CASES = [(scope, MODEL, layout) for scope in SCOPES for layout in LAYOUTS[1:]]
CASES += [("sequence_unbiased", BIASED, layout) for layout in LAYOUTS[1:]]
CASES += [("sequence", BIASED, LAYOUTS[1]), ("accumulated", BIASED, LAYOUTS[2]), ("z", BIASED, LAYOUTS[0])]


@pytest.mark.parametrize(
    ("scope", "model", "layout"), CASES, ids=[f"{scope}-{model.scores}-{layout}" for scope, model, layout in CASES]
)
def test_scopes_equal_numpy(scope, model, layout):
    data, expert, microbatches = layout
    loss, grad = device_value(scope, data, expert, microbatches, model)
    want, want_grad = numpy_value(scope, data * expert, microbatches, model)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(grad, want_grad, rtol=1e-4, atol=1e-6)


def test_which_scopes_promise_the_same_on_every_mesh():
    """The oracle itself: the values that are to be equal are, and the others differ, so the test above can fail."""
    for scope in SCOPES:
        values = {round(numpy_value(scope, d * e, m)[0], 6) for d, e, m in [*LAYOUTS, (8, 1, 2)]}
        assert (len(values) == 1) == (scope in ("sequence", "global_batch", "z")), (scope, values)
    biased, unbiased = (numpy_value(scope, 1, 1, BIASED)[0] for scope in ("sequence", "sequence_unbiased"))
    assert abs(biased - unbiased) > 0.01
