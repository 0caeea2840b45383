"""Multi-token prediction: loss and gradients of a plain loop over positions, on every mesh; what may go with it."""

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
from moejax.errors import UserError
from moejax.plan.compile import compile_step
from moejax.plan.description import FFN, MTP, Description, Group, Layer
from moejax.plan.flops import forward_flops
from moejax.plan.mixers import Attention
from moejax.plan.moves import (
    CLASSES,
    COMBINE,
    CONTEXT_CLASS,
    DISPATCH,
    REDUCE,
    TENSOR,
    VOCABULARY,
    by_class,
    compiled_traffic,
)
from moejax.plan.moves import LOSS as LOSS_CLASS
from moejax.plan.parameters import module_counts, mtp_parameters
from moejax.plan.report import mesh_of
from moejax.plan.target import read_target
from moejax.plan.tensors import tensors
from moejax.plan.traffic import step_traffic

LOSS = LossConfig(balance_weight=0.3, z_weight=0.1, mtp_weight=0.7)  # large, so that their gradients are seen
SMALL = dataclasses.replace(tiny.MODEL, layers=(LayerGroup(2),), moe=dataclasses.replace(tiny.MODEL.moe, shared_dim=0))
MODELS = {
    "one": dataclasses.replace(SMALL, mtp=1),
    "two": dataclasses.replace(tiny.MODEL, mtp=2),
    "tail": dataclasses.replace(
        SMALL, mtp=3, tie_embeddings=True, layers=(LayerGroup(1), LayerGroup(1, (LayerSpec("dense", window=3),)))
    ),
}


def config(name: str, mesh: dict[str, int] | None = None, microbatches: int = 1, **sections: Any) -> Config:
    """A run of a model of `MODELS`."""
    run = tiny.config(microbatches=microbatches, model=MODELS[name], loss=LOSS)
    return dataclasses.replace(run, mesh=MeshConfig(**(mesh or {})), **sections)


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


SLOW = pytest.mark.slow
CASES = [
    pytest.param("one", {"data": 2, "expert": 2}, 2, {}, id="two microbatches"),
    pytest.param("one", {"stage": 2, "expert": 2}, 2, {}, id="pipeline"),
    pytest.param("two", {"stage": 2, "expert": 2}, 4, {}, id="two in a pipeline", marks=SLOW),
    pytest.param("one", {}, 1, {}, id="one device", marks=SLOW),
    pytest.param("two", {"data": 2, "expert": 4}, 1, {"weights": WeightsConfig("layer")}, id="layer", marks=SLOW),
    pytest.param("two", {"context": 4, "expert": 2}, 1, {"context": ContextConfig("ring")}, id="ring", marks=SLOW),
    pytest.param("two", {}, 2, {"weights": WeightsConfig("layer"), "remat": RematConfig("none")}, id="m", marks=SLOW),
    pytest.param("two", {"expert": 2, "model": 2}, 2, {"remat": RematConfig("full")}, id="widths", marks=SLOW),
    pytest.param("two", {"data": 2, "expert": 2}, 2, {"moe": MoEConfig("ragged")}, id="ragged", marks=SLOW),
    pytest.param("tail", {"context": 2, "data": 2}, 2, {}, id="ulysses", marks=SLOW),
    pytest.param("tail", {"expert": 2, "data": 2}, 2, {"weights": WeightsConfig("microbatch")}, id="mb", marks=SLOW),
    pytest.param("tail", {"stage": 2, "data": 2, "model": 2}, 2, {}, id="pipeline and widths", marks=SLOW),
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


def test_evaluation_is_that_of_the_model_alone():
    run = config("one", {"data": 2})
    program, alone = tiny.program(run), tiny.program(run.without_mtp)
    params, batch = program.init(0).params, tiny.batch(run)
    got = program.eval_step(params, program.put(batch))
    want = alone.eval_step(alone.init(0).params, alone.put(batch))
    assert {key: float(value) for key, value in got.items()} == {key: float(value) for key, value in want.items()}
    poisoned = params | {"mtp": jax.tree.map(lambda leaf: leaf * np.float32(np.nan), params["mtp"])}
    assert float(program.eval_step(poisoned, program.put(batch))["loss_sum"]) == float(want["loss_sum"])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"expert": 2, "model": 2}, {"expert": 2, "context": 2}])
def test_traffic_by_formula_is_that_of_the_compiled_step(mesh):
    run = config("two", mesh, remat=RematConfig("full" if "model" in mesh else "none"))
    layers = (LayerGroup(2, (LayerSpec("dense", window=5),)), LayerGroup(2))  # XLA unrolls a loop of one turn
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, layers=layers))
    got = by_class(compiled_traffic(compile_step(run, read_target("cpu")).collectives, mesh_of(run)))
    want = by_class(step_traffic(run, tensors(run), read_target("cpu")))
    for name in set(CLASSES) - {LOSS_CLASS, REDUCE}:
        assert got[name] == want[name], name
    assert (
        0 <= got[REDUCE]["bytes"] - want[REDUCE]["bytes"] <= 2 * 64
    )  # sums of the losses of both, with small gradients
    used = {DISPATCH, COMBINE, *((TENSOR, VOCABULARY) if "model" in mesh else (CONTEXT_CLASS,))}
    assert all(want[name]["bytes"] for name in used)


def test_parameters_stand_apart_and_equal_a_description():
    run = config("two")
    model, a = run.model, run.model.attention
    mixer = Attention(num_heads=a.num_heads, num_kv_heads=a.num_kv_heads, head_dim=a.head_dim, qk_norm="head")
    moe = Layer(mixer, FFN(num_experts=8, top_k=2, expert_dim=24, shared_dim=16))
    groups = (Group(1, (Layer(mixer, FFN(dense_dim=40)),)), Group(2, (moe,)))
    described = Description(model.vocab_size, model.d_model, groups, mtp=MTP((moe,), repeat=2))
    assert mtp_parameters(run) == described.mtp_parameters() > 0
    assert module_counts(run).as_dict() == module_counts(run.without_mtp).as_dict() == described.counts().as_dict()
    assert sum(tensor.size for tensor in tensors(run)) == described.counts().total + described.mtp_parameters()


def test_flops_are_counted():
    run = config("two")
    model, a, m = run.model, run.model.attention, run.model.moe
    more = sum(forward_flops(run, tensors(run)).values())
    more -= sum(forward_flops(run.without_mtp, tensors(run.without_mtp)).values())
    weights = 2 * model.d_model**2 + model.d_model * model.vocab_size  # projection, and the head once more
    weights += 2 * model.d_model * a.head_dim * (a.num_heads + a.num_kv_heads)
    weights += model.d_model * (m.num_experts + 3 * (m.top_k * m.expert_dim + m.shared_dim))
    scores = 4 * a.num_heads * a.head_dim * (16 + 1) / 2
    assert more == pytest.approx(2 * (2 * weights + scores))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": MeshConfig(stage=3)}, "model.mtp=2: must be 0, or mesh.stage a divisor of the 32 sequences"),
        ({"model": SMALL, "loss": LOSS}, "loss.mtp_weight=0.7: must be left out: model.mtp=0"),
        ({"mesh": MeshConfig(context=8), "context": ContextConfig("ring")}, "model.mtp=2: must be less than the 2 tok"),
    ],
)
def test_what_has_no_effect_or_cannot_be_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(config("two"), **change)


def test_weights_and_numbers_are_checked():
    with pytest.raises(UserError, match="loss.mtp_weight=0.0: must be greater than zero"):
        LossConfig(mtp_weight=0.0)
    with pytest.raises(UserError, match="model.mtp=-1: must be zero or greater"):
        dataclasses.replace(SMALL, mtp=-1)


def test_selection_biases_of_modules_move_too():
    moe = dataclasses.replace(SMALL.moe, selection_bias=True, scores="sigmoid")
    model, loss = dataclasses.replace(MODELS["one"], moe=moe), dataclasses.replace(LOSS, bias_rate=0.02)
    run = dataclasses.replace(config("one"), model=model, loss=loss)
    program = tiny.program(run)
    state, metrics = program.train_step(program.init(0), program.put(tiny.batch(run)))
    requested = np.asarray(metrics["moe/requested"], np.float64)[-1]
    sign = np.sign(requested.mean() - requested)
    got = np.asarray(state.params["mtp"]["0"]["ffn"]["selection_bias"])[0]
    np.testing.assert_allclose(got, 0.02 * (sign - sign.mean()), rtol=1e-5)
