"""Formulas of pipeline, context and tensor parallelism against compiled steps, class by class."""

import dataclasses
from typing import Any

import pytest
import tiny

from moejax.config import Config, ContextConfig, LayerGroup, LayerSpec, MeshConfig, PipelineConfig, RematConfig
from moejax.plan.compile import compile_step
from moejax.plan.cost import step_cost
from moejax.plan.moves import (
    CLASSES,
    CONTEXT_CLASS,
    LOSS,
    PIPELINE,
    REDUCE,
    TENSOR,
    VOCABULARY,
    by_class,
    compiled_traffic,
)
from moejax.plan.report import mesh_of
from moejax.plan.target import read_target
from moejax.plan.tensors import tensors
from moejax.plan.traffic import step_traffic
from moejax.plan.turns import bubble, ticks

MODEL = dataclasses.replace(tiny.MODEL, layers=(LayerGroup(2, (LayerSpec("dense", window=5),)), LayerGroup(2)))


def configuration(microbatches: int, remat: str = "save_exchange", **axes: Any) -> Config:
    sections = {key: axes.pop(key) for key in ("context_config", "pipeline") if key in axes}
    run = tiny.config(microbatches=microbatches, model=MODEL)
    return dataclasses.replace(
        run,
        mesh=MeshConfig(**axes),
        remat=RematConfig(remat),  # type: ignore[arg-type]
        context=sections.get("context_config", ContextConfig()),
        pipeline=sections.get("pipeline", PipelineConfig()),
    )


def assert_agrees(run: Config, wanted: set[str]) -> None:
    """Tensors and bytes of every class; XLA may reduce sums of the loss together with small gradients."""
    found = compile_step(run, read_target("cpu")).collectives
    got = by_class(compiled_traffic(found, mesh_of(run)))
    want = by_class(step_traffic(run, tensors(run), "cpu"))
    for name in set(CLASSES) - {LOSS, REDUCE}:
        for unit in ("tensors", "bytes"):
            assert got[name][unit] == want[name][unit], (name, unit)
    assert 0 <= got[REDUCE]["bytes"] - want[REDUCE]["bytes"] <= 64
    assert {name for name in (PIPELINE, CONTEXT_CLASS, TENSOR, VOCABULARY) if want[name]["bytes"]} == wanted
    assert got[LOSS]["bytes"] < 4000


def test_stages_and_widths() -> None:
    assert_agrees(configuration(4, stage=2, expert=2, model=2), {PIPELINE, TENSOR, VOCABULARY})


RING = ContextConfig("ring")
CASES = [
    (configuration(4, stage=2, data=2, expert=2), {PIPELINE, VOCABULARY}),
    (configuration(4, stage=4, expert=2), {PIPELINE, VOCABULARY}),
    (configuration(4, stage=2, expert=2, pipeline=PipelineConfig(virtual_stages=2)), {PIPELINE, VOCABULARY}),
    (configuration(1, data=2, expert=2, model=2), {TENSOR, VOCABULARY}),
    (configuration(2, "full", data=2, expert=2, model=2), {TENSOR, VOCABULARY}),
    (configuration(1, "none", data=2, expert=2, model=2), {TENSOR, VOCABULARY}),
    (configuration(1, data=2, expert=2, context=2), {CONTEXT_CLASS}),
    (configuration(1, "full", data=2, expert=2, context=2), {CONTEXT_CLASS}),
    (configuration(2, expert=2, context=4, context_config=RING), {CONTEXT_CLASS}),
    (configuration(1, "full", expert=2, context=2, model=2, context_config=RING), {CONTEXT_CLASS, TENSOR, VOCABULARY}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("run", "wanted"), CASES)
def test_stages_context_and_widths(run: Config, wanted: set[str]) -> None:
    assert_agrees(run, wanted)


@pytest.mark.parametrize(("stages", "virtual", "microbatches"), [(2, 1, 4), (4, 1, 8), (2, 2, 4)])
def test_bubble_and_ticks(stages: int, virtual: int, microbatches: int) -> None:
    run = configuration(microbatches, stage=stages, pipeline=PipelineConfig(virtual_stages=virtual))
    assert bubble(run) == pytest.approx((stages - 1) / (virtual * microbatches + stages - 1))
    assert ticks(run) == (virtual * microbatches + stages - 1,) * 2
    assert (bubble(configuration(4)), ticks(configuration(4))) == (0.0, (4, 4))


def test_mfu_of_a_pipeline_is_its_share_of_model_time() -> None:
    run = configuration(4, stage=2, expert=2)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, dtype="bfloat16"))
    cost = step_cost(run, tensors(run), read_target("v5p"))
    assert cost.taxes["pipeline"] > 0
    assert cost.mfu == pytest.approx(cost.model / cost.step)
