"""Multi-token prediction: loss and gradients of a plain loop over positions, on every mesh; what may go with it."""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest
import tiny
from reference_model import reference_loss
from test_step_mesh import assert_trees_close

from moejax.config import Config, ContextConfig, LayerGroup, LayerSpec, LossConfig, MeshConfig, RematConfig
from moejax.config import WeightsConfig
from moejax.errors import UserError

LOSS = LossConfig(balance_weight=0.3, z_weight=0.1, mtp_weight=0.7)  # large, so that their gradients are seen
MODELS = {
    "one": dataclasses.replace(tiny.MODEL, mtp=1),
    "two": dataclasses.replace(tiny.MODEL, mtp=2),
    "three, dense, tied": dataclasses.replace(
        tiny.MODEL,
        mtp=3,
        tie_embeddings=True,
        layers=(LayerGroup(1), LayerGroup(1, (LayerSpec("dense", window=3),))),
    ),
}


def config(name: str, mesh: MeshConfig = MeshConfig(), microbatches: int = 1, **sections) -> Config:
    """A run of a model of `MODELS`."""
    run = tiny.config(microbatches=microbatches, model=MODELS[name], loss=LOSS)
    return dataclasses.replace(run, mesh=mesh, **sections)


@cache
def reference(name: str):
    """Loss, its parts and gradients of the oracle."""
    run = config(name)
    params = jax.device_get(tiny.program(run).init(0).params)
    batch = {key: np.asarray(value) for key, value in tiny.batch(run).items()}
    with jax.numpy_dtype_promotion("standard"):
        loss = jax.value_and_grad(lambda p: reference_loss(p, batch, run), has_aux=True)
        (total, parts), grads = jax.jit(loss)(params)
    return float(total), parts, grads


CASES = [
    ("one", MeshConfig(), 1, {}),
    ("two", MeshConfig(), 2, {"weights": WeightsConfig("layer"), "remat": RematConfig("none")}),
    ("two", MeshConfig(data=2, expert=2, model=2), 2, {"remat": RematConfig("full")}),
    ("two", MeshConfig(data=2, expert=4), 1, {"weights": WeightsConfig("layer")}),
    ("three, dense, tied", MeshConfig(expert=2, data=2), 2, {"weights": WeightsConfig("microbatch")}),
    ("two", MeshConfig(context=4, expert=2), 1, {"context": ContextConfig("ring")}),
    ("three, dense, tied", MeshConfig(context=2, data=2), 2, {}),
]


@pytest.mark.parametrize(("name", "mesh", "microbatches", "sections"), CASES)
def test_gradients_equal_a_loop_over_positions(name, mesh, microbatches, sections):
    run = config(name, mesh, microbatches, **sections)
    want_loss, parts, want = reference(name)
    program = tiny.program(run)
    grads, metrics = jax.jit(program.gradients)(program.init(0).params, program.put(tiny.batch(run)))
    np.testing.assert_allclose(float(metrics["loss"]), want_loss, rtol=1e-5)
    for key in ("ce_loss", "mtp_loss", "balance_loss", "z_loss"):
        np.testing.assert_allclose(float(metrics[key]), float(parts[key]), rtol=1e-5)
    assert_trees_close(jax.device_get(grads), want, program.decoder.dims, 1e-5)
    np.testing.assert_array_equal(np.asarray(metrics["moe/requested"]), np.asarray(parts["counts"]))
