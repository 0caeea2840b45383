"""The mesh never changes the mathematics: losses and gradients equal a dense oracle on every mesh."""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest
import tiny
from reference_model import reference_loss

from moejax.config import AttentionConfig, LayerGroup, LayerSpec, LossConfig, RematConfig, WeightsConfig

STEPS = 5
# meshes data x expert, microbatches and gather modes, each mesh with several of both
CASES = [
    (1, 1, 4, "layer"),
    (8, 1, 4, "step"),
    (1, 8, 2, "step"),
    (1, 8, 4, "microbatch"),
    (2, 4, 2, "layer"),
    (4, 2, 4, "step"),
    (4, 2, 1, "microbatch"),
]


def train(run) -> list[float]:
    """Losses of the first steps."""
    program = tiny.program(run)
    state, losses = program.init(0), []
    for step in range(STEPS):
        state, metrics = program.train_step(state, program.put(tiny.batch(run, step)))
        losses.append(float(metrics["loss"]))
    assert int(state.skipped) == 0
    return losses


@pytest.fixture(scope="module")
def single() -> list[float]:
    """Losses on one device."""
    return train(tiny.config())


def assert_trees_close(got, want, dims, tolerance: float) -> None:
    """Every leaf agrees, in every layer and every expert apart, relative to the largest entry there."""
    paths = jax.tree_util.tree_leaves_with_path(dims, is_leaf=lambda x: isinstance(x, tuple))
    for (path, names), g, w in zip(paths, jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        for part in np.ndindex(w.shape[: sum(name in ("layers", "experts") for name in names)]):
            scale = max(np.abs(w[part]).max(), np.abs(w).max() * 1e-3)
            error = np.max(np.abs(g[part] - w[part])) / scale
            assert error <= tolerance, f"{jax.tree_util.keystr(path)}{list(part)}: {error:.1e}"


@pytest.mark.parametrize(("data", "expert", "microbatches", "gather"), CASES)
def test_losses_agree_on_every_mesh(single, data, expert, microbatches, gather):
    losses = train(tiny.config(data, expert, microbatches, weights=WeightsConfig(gather)))
    np.testing.assert_allclose(losses, single, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["step", "microbatch", "layer"])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize(("data", "expert"), [(1, 1), (8, 1), (1, 8), (2, 4), (4, 2)])
def test_losses_agree_in_every_combination(single, data, expert, microbatches, gather):
    test_losses_agree_on_every_mesh(single, data, expert, microbatches, gather)


@cache
def reference(model: str):
    """Loss, its parts and the gradients of the oracle."""
    run = tiny.config(model=MODELS[model], loss=LOSS)
    params = jax.device_get(tiny.program(run).init(0).params)
    batch = {key: np.asarray(value) for key, value in tiny.batch(run).items()}
    with jax.numpy_dtype_promotion("standard"):
        (loss, parts), grads = jax.jit(jax.value_and_grad(lambda p: reference_loss(p, batch, run), has_aux=True))(
            params
        )
    return float(loss), parts, grads


MODELS = {
    "default": tiny.MODEL,
    "full norm, tied, not renormalised, no shared expert": dataclasses.replace(
        tiny.MODEL,
        tie_embeddings=True,
        attention=AttentionConfig(num_heads=4, num_kv_heads=1, head_dim=8, qk_norm="full"),
        moe=dataclasses.replace(tiny.MODEL.moe, merge="raw", shared_dim=0, top_k=3),
    ),
    "mixed pattern, no qk norm, top 1": dataclasses.replace(
        tiny.MODEL,
        layers=(LayerGroup(2, (LayerSpec("moe", window=3), LayerSpec("dense"))),),
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8, qk_norm="none"),
        moe=dataclasses.replace(tiny.MODEL.moe, top_k=1, merge="raw"),
    ),
}


LOSS = LossConfig(balance_weight=0.3, z_weight=0.1)  # large, so that their gradients are seen


@pytest.mark.parametrize(
    ("model", "data", "expert", "microbatches", "gather", "remat"),
    [
        ("default", 2, 4, 2, "step", "none"),
        ("default", 4, 2, 1, "layer", "save_exchange"),
        ("default", 1, 8, 4, "microbatch", "full"),
        ("full norm, tied, not renormalised, no shared expert", 4, 2, 1, "step", "full"),
        ("mixed pattern, no qk norm, top 1", 2, 4, 2, "layer", "none"),
    ],
)
def test_gradients_equal_dense_oracle(model, data, expert, microbatches, gather, remat):
    sections = {"loss": LOSS, "weights": WeightsConfig(gather), "remat": RematConfig(remat)}
    run = tiny.config(data, expert, microbatches, model=MODELS[model], **sections)
    want_loss, parts, want = reference(model)
    program = tiny.program(run)
    grads, metrics = jax.jit(program.gradients)(program.init(0).params, program.put(tiny.batch(run)))
    np.testing.assert_allclose(float(metrics["loss"]), want_loss, rtol=1e-5)
    for key in ("ce_loss", "balance_loss", "z_loss"):
        np.testing.assert_allclose(float(metrics[key]), float(parts[key]), rtol=1e-5)
    counts = np.asarray(parts["counts"], np.float64)
    np.testing.assert_allclose(
        float(metrics["moe/requested_max_over_mean"]), (counts.max(1) / counts.mean(1)).max(), rtol=1e-6
    )
    assert_trees_close(jax.device_get(grads), want, program.decoder.dims, 1e-5)
    norm = np.sqrt(sum(np.sum(np.square(np.asarray(g, np.float64))) for g in jax.tree.leaves(want)))
    np.testing.assert_allclose(float(metrics["grad_norm"]), norm, rtol=1e-5)
