"""Collectives counted from compiled programs: the promises of `weights.gather`, and the counting itself."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import jax
import pytest
import tiny

from moejax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    LayerGroup,
    LayerSpec,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    MoEModelConfig,
    RematConfig,
    TrainConfig,
    WeightsConfig,
)
from moejax.plan.compile import compile_step
from moejax.plan.hlo import Collective, collectives
from moejax.plan.moves import GATHER, LOSS, REDUCE, compiled_traffic
from moejax.plan.report import mesh_of
from moejax.plan.target import read_target
from moejax.plan.tensors import Tensor, tensors
from moejax.plan.traffic import stacked_sums, step_traffic

LAYERS, MOE_LAYERS = 5, 3
MODEL = dataclasses.replace(tiny.MODEL, layers=(LayerGroup(2, (LayerSpec("dense", window=5),)), LayerGroup(3)))
"""Each group is repeated: XLA unrolls a loop of one turn, and keeps what it gathered for backward."""

MESH = {"stage": 1, "data": 2, "context": 1, "expert": 4, "model": 1}


def configuration(gather: str, microbatches: int, data: int = 2, expert: int = 4, **sections: Any) -> Config:
    weights = WeightsConfig(gather)  # type: ignore[arg-type]
    return tiny.config(data, expert, microbatches, model=MODEL, weights=weights, **sections)


def compile_collectives(run: Config) -> list[Collective]:
    """Collectives of a training step that have more than one device to a group."""
    program = tiny.program(run)
    text = program.train_step.lower(program.abstract_state, program.abstract_batch).compile().as_text()
    assert text is not None
    return [item for item in collectives(text) if item.group_size > 1]


@cache
def compiled(gather: str, microbatches: int) -> tuple[list[Collective], list[Tensor]]:
    """Collectives of a program that several tests look at, and its parameters."""
    run = configuration(gather, microbatches)
    return compile_collectives(run), tensors(run)


def count(found: list[Collective], kind: str, dtype: str = "f32", backward: bool | None = None) -> int:
    return sum(
        item.tensors
        for item in found
        if (item.kind, item.dtype) == (kind, dtype) and backward in (None, "transpose(" in item.scope)
    )


def sharded(found: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor in found if any(tensor.layout.extra)]


def extra_axes(tensor: Tensor) -> tuple[str, ...]:
    return tuple(axis for axes in tensor.layout.extra for axis in axes)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_step_gathers_and_scatters_each_leaf_once_whatever_the_microbatches(microbatches: int) -> None:
    found, leaves = compiled("step", microbatches)
    leaves = sharded(leaves)
    assert len(leaves) == 17
    assert count(found, "all-gather") == len(leaves)
    assert count(found, "reduce-scatter") == len(leaves)
    want = Counter((tensor.compute_size, extra_axes(tensor)) for tensor in leaves)
    for kind in ("all-gather", "reduce-scatter"):  # and they are these leaves, over the axes that only storage has
        moved = [item for item in found if (item.kind, item.dtype) == (kind, "f32")]
        assert Counter((item.bytes // 4, item.axes(MESH)) for item in moved) == want


@pytest.mark.parametrize("microbatches", [1, 4])
def test_layer_gathers_in_forward_and_backward_of_every_layer_and_microbatch(microbatches: int) -> None:
    found, leaves = compiled("layer", microbatches)
    stacked = sum(tensor.layout.shape[0] for tensor in sharded(leaves) if tensor.stacked)
    ends = sum(not tensor.stacked for tensor in sharded(leaves))
    assert (stacked, ends) == (2 * 6 + 3 * 9, 2)
    assert count(found, "all-gather", backward=False) == microbatches * (stacked + ends)
    assert count(found, "all-gather", backward=True) == microbatches * stacked
    assert count(found, "reduce-scatter") == microbatches * (stacked + ends)


def test_microbatch_gathers_once_in_every_microbatch() -> None:
    found, leaves = compiled("microbatch", 4)
    assert count(found, "all-gather") == 4 * len(sharded(leaves))
    assert count(found, "reduce-scatter") == 4 * len(sharded(leaves))


@pytest.mark.parametrize(("gather", "microbatches"), [("step", 1), ("step", 4), ("layer", 1), ("layer", 4)])
def test_rows_cross_twice_forward_and_twice_backward(gather: str, microbatches: int) -> None:
    found, _ = compiled(gather, microbatches)
    rows = Counter()
    for item in found:
        if item.kind == "all-to-all":
            assert MODEL.d_model <= item.shapes[0][-1] <= MODEL.d_model + 2  # weights and places ride with the row
            rows["transpose(" in item.scope] += item.tensors
    assert rows == {False: 2 * MOE_LAYERS * microbatches, True: 2 * MOE_LAYERS * microbatches}
    assert count(found, "all-gather", "s32") == MOE_LAYERS * microbatches  # counts of routes, of each layer's plan


def assert_formula_agrees(run: Config, found: Sequence[Collective], target: str) -> None:
    """Every class: operation, type, axes, number of tensors and bytes."""
    leaves = tensors(run)
    want = set(step_traffic(run, leaves, read_target(target)))
    assert set(compiled_traffic(found, mesh_of(run), stacked_sums(run, leaves))) == want
    assert run.mesh.size == 1 or {move.name for move in want} >= {GATHER, REDUCE, LOSS}


@pytest.mark.parametrize(
    ("gather", "microbatches"), [("step", 1), ("step", 4), ("microbatch", 4), ("layer", 1), ("layer", 4)]
)
def test_formula_agrees_with_the_compiled_step(gather: str, microbatches: int) -> None:
    assert_formula_agrees(configuration(gather, microbatches), compiled(gather, microbatches)[0], "cpu")


PADDED, DEDUPLICATED = MoEConfig("padded", 1.5), MoEConfig("padded", 1.5, deduplicate=True)
MANY = [
    (8, 1, "step", 4, "none", MoEConfig()),
    (8, 1, "layer", 1, "full", MoEConfig(capacity=1.0)),
    (4, 2, "step", 1, "full", PADDED),
    (4, 2, "layer", 4, "save_exchange", DEDUPLICATED),
    (2, 4, "microbatch", 1, "full", DEDUPLICATED),
    (1, 8, "step", 4, "save_exchange", PADDED),
    (1, 8, "layer", 1, "none", MoEConfig("padded")),
    (2, 4, "step", 4, "none", MoEConfig("gather", 1.25)),
    (1, 8, "step", 1, "full", MoEConfig("gather")),
    (4, 2, "layer", 1, "save_exchange", MoEConfig("gather")),
    (1, 4, "microbatch", 4, "full", PADDED),
    (1, 1, "step", 1, "none", MoEConfig()),
    (2, 4, "step", 1, "none", MoEConfig("ragged")),
    (2, 4, "step", 4, "save_exchange", MoEConfig("ragged", 1.25)),
    (2, 4, "layer", 1, "full", MoEConfig("ragged", 1.25, deduplicate=True)),
    (2, 4, "step", 1, "full", MoEConfig("padded", 1.5, wire="mxfp8")),
    (2, 4, "step", 1, "none", MoEConfig("ragged", deduplicate=True, wire="mxfp8")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("data", "expert", "gather", "microbatches", "remat", "moe"), MANY)
def test_formula_agrees_with_many_compiled_steps(data, expert, gather, microbatches, remat, moe) -> None:
    run = configuration(gather, microbatches, data, expert, remat=RematConfig(remat), moe=moe)
    assert_formula_agrees(run, compile_collectives(run), "cpu")


WHOLE = ModelConfig(
    vocab_size=1024,
    d_model=1024,
    mlp_dim=256,
    layers=MODEL.layers,
    attention=AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=128),
    moe=MoEModelConfig(num_experts=16, top_k=8, expert_dim=128, shared_dim=128),
)
"""Shards of an eighth are whole tiles of 128 lanes: TPUs sum what is smaller whole, instead of scattering the sum."""

on_tpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'moejax[tpu]'")


def assert_formula_agrees_on_tpu(case: int, target: str) -> None:
    data, expert, gather, microbatches, remat, moe = MANY[case]
    run = Config(
        mesh=MeshConfig(data=data, expert=expert),
        model=WHOLE,
        data=DataConfig(batch_size=data * expert * microbatches, sequence_length=128),
        train=TrainConfig(steps=20, microbatches=microbatches),
        weights=WeightsConfig(gather),  # type: ignore[arg-type]
        remat=RematConfig(remat),  # type: ignore[arg-type]
        moe=moe,
    )
    with jax.numpy_dtype_promotion("standard"):
        found = compile_step(run, read_target(target)).collectives
    assert_formula_agrees(run, found, target)


@on_tpu
def test_formula_agrees_with_a_step_compiled_for_tpu() -> None:
    assert_formula_agrees_on_tpu(2, "v5e")


@pytest.mark.slow
@on_tpu
@pytest.mark.parametrize("case", [0, 1, 3, 4, 5, 6, 7, 8, 9, 13, 14])
def test_formula_agrees_with_many_steps_compiled_for_tpu(case: int) -> None:
    assert_formula_agrees_on_tpu(case, "v5e")
