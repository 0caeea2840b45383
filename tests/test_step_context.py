"""Sequences sharded over the context axis: losses and gradients equal the dense oracle on every mesh."""

import dataclasses
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from reference_model import reference_loss
from test_step_mesh import assert_trees_close

from moejax.config import (
    AttentionConfig,
    Config,
    ContextConfig,
    LayerGroup,
    LayerSpec,
    LossConfig,
    MeshConfig,
    MoEConfig,
    RematConfig,
    WeightsConfig,
)
from moejax.model.decoder import Decoder
from moejax.train.sample import on_one_device

LOSS = LossConfig(balance_weight=0.3, z_weight=0.1)  # large, so that their gradients are seen
MODEL = dataclasses.replace(
    tiny.MODEL,
    layers=(LayerGroup(1, (LayerSpec("dense", window=5),)), LayerGroup(2)),
    attention=AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=4),
)


def configuration(mesh: MeshConfig, kind: str, fold: bool = False, **sections: Any) -> Config:
    """A run whose windows and documents cross shards."""
    context = ContextConfig(kind) if mesh.context > 1 else ContextConfig()  # type: ignore[arg-type]
    moe = MoEConfig(expert_axes=("context", "expert") if fold else ("expert",))
    base = dataclasses.replace(tiny.config(), model=MODEL, loss=LOSS)
    return dataclasses.replace(base, **{"mesh": mesh, "context": context, "moe": moe, **sections})


@cache
def reference() -> tuple[Any, ...]:
    """Parameters, loss, its parts and the gradients of the oracle."""
    run = configuration(MeshConfig(), "ulysses")
    params = jax.device_get(tiny.program(run).init(0).params)
    batch = tiny.batch(run)
    with jax.numpy_dtype_promotion("standard"):
        (loss, parts), grads = jax.jit(jax.value_and_grad(lambda p: reference_loss(p, batch, run), has_aux=True))(
            params
        )
    return params, float(loss), parts, grads


def check(
    mesh: MeshConfig, kind: str, fold: bool = False, microbatches: int = 1, gather: str = "step", remat: str = "none"
) -> None:
    weights, policy = WeightsConfig(gather), RematConfig(remat)  # type: ignore[arg-type]
    train = dataclasses.replace(tiny.config().train, microbatches=microbatches)
    run = configuration(mesh, kind, fold, weights=weights, remat=policy, train=train)
    _, want_loss, parts, want = reference()
    program = tiny.program(run)
    grads, metrics = jax.jit(program.gradients)(program.init(0).params, program.put(tiny.batch(run)))
    np.testing.assert_allclose(float(metrics["loss"]), want_loss, rtol=1e-5)
    for key in ("ce_loss", "balance_loss", "z_loss"):
        np.testing.assert_allclose(float(metrics[key]), float(parts[key]), rtol=1e-5)
    assert_trees_close(jax.device_get(grads), want, program.decoder.dims, 1e-5)


@pytest.mark.parametrize(
    ("mesh", "kind", "fold", "microbatches", "gather", "remat"),
    [
        (MeshConfig(data=2, context=2, expert=2), "ulysses", True, 2, "step", "save_exchange"),
        (MeshConfig(context=4, expert=2), "ring", False, 1, "layer", "full"),
    ],
)
def test_gradients_equal_dense_oracle(mesh, kind, fold, microbatches, gather, remat):
    check(mesh, kind, fold, microbatches, gather, remat)


MESHES = [(1, 2, 1), (1, 4, 1), (2, 2, 2), (1, 2, 4), (1, 4, 2), (2, 4, 1)]
WAYS = [(False, 2, "step", "save_exchange"), (True, 1, "layer", "full"), (True, 4, "microbatch", "none")]


def test_text_comes_from_one_device_whatever_the_mesh_of_the_run():
    moe = MoEConfig("padded", 1.5, drop_order="position", deduplicate=True, expert_axes=("context", "expert"))
    run = configuration(MeshConfig(data=2, context=2, expert=2), "ring", moe=moe)
    alone = on_one_device(run)
    assert (alone.mesh.size, alone.model) == (1, run.model)
    batch = {key: value[:1] for key, value in tiny.batch(run).items()}
    x_BSD, _ = Decoder(alone).layers(reference()[0], batch, lambda name, stored: stored)
    assert x_BSD.shape == (1, run.data.sequence_length, MODEL.d_model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ulysses", "ring"])
@pytest.mark.parametrize("number", range(len(MESHES)))
def test_gradients_equal_dense_oracle_on_every_mesh(number, kind):
    data, context, expert = MESHES[number]
    way = WAYS[(number + (kind == "ring")) % len(WAYS)]  # each kind meets each way on two meshes
    check(MeshConfig(data=data, context=context, expert=expert), kind, *way)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "kind", "fold", "microbatches", "remat"),
    [
        (MeshConfig(context=2, expert=2, model=2), "ulysses", False, 1, "save_exchange"),
        (MeshConfig(context=4, model=2), "ring", False, 1, "save_exchange"),
        (MeshConfig(stage=2, context=2, expert=2), "ring", False, 4, "save_exchange"),
        (MeshConfig(stage=2, context=2, expert=2), "ulysses", True, 4, "full"),
        (MeshConfig(stage=2, context=2, model=2), "ulysses", False, 2, "save_exchange"),
    ],
)
def test_gradients_equal_dense_oracle_with_stages_and_tensor_parallelism(mesh, kind, fold, microbatches, remat):
    check(mesh, kind, fold, microbatches, "step", remat)
