"""Formulas of pipeline, context and tensor parallelism against compiled steps, class by class."""

import dataclasses
from typing import Any

import pytest
import tiny

from moejax.config import Config, ContextConfig, LayerGroup, LayerSpec, MeshConfig, PipelineConfig, RematConfig
from moejax.plan.compile import compile_step
from moejax.plan.cost import step_cost
from moejax.plan.moves import (
    CONTEXT_CLASS,
    LOSS,
    PIPELINE,
    REDUCE,
    TENSOR,
    VOCABULARY,
    Move,
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
    run = tiny.config(microbatches=microbatches, model=dataclasses.replace(MODEL, mtp=axes.pop("mtp", 0)))
    return dataclasses.replace(
        run,
        mesh=MeshConfig(**axes),
        remat=RematConfig(remat),  # type: ignore[arg-type]
        context=sections.get("context_config", ContextConfig()),
        pipeline=sections.get("pipeline", PipelineConfig()),
    )


def assert_agrees(run: Config, wanted: set[str]) -> None:
    """Every class: operation, type, axes, number of tensors and bytes."""
    found = compile_step(run, read_target("cpu")).collectives
    got = sums_together(compiled_traffic(found, mesh_of(run)))
    want = sums_together(step_traffic(run, tensors(run), read_target("cpu")))
    assert got == want
    assert {name for name, *_ in want if name in (PIPELINE, CONTEXT_CLASS, TENSOR, VOCABULARY)} == wanted


def sums_together(moves: list[Move]) -> dict[tuple, tuple[int, int]]:
    """Tensors and bytes of like moves. XLA sums parts of the loss and small gradients at once: they are one class."""
    found: dict[tuple, tuple[int, int]] = {}
    for move in moves:
        summed = move.kind == "all-reduce" and move.name in (LOSS, REDUCE)
        key = ("sums" if summed else move.name, move.kind, move.dtype, move.axes)
        tensors, size = found.get(key, (0, 0))
        found[key] = (tensors + move.tensors, size + move.bytes)
    return found


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
    (configuration(4, data=2, expert=2, mtp=2), set()),
    (configuration(4, stage=2, expert=2, context=2), {PIPELINE, VOCABULARY, CONTEXT_CLASS}),
    (configuration(4, "full", stage=2, data=2, expert=2, mtp=1), {PIPELINE, VOCABULARY}),
    (configuration(4, stage=2, expert=2, context=2, mtp=1), {PIPELINE, VOCABULARY, CONTEXT_CLASS}),
    (configuration(4, stage=2, expert=2, mtp=2, pipeline=PipelineConfig(virtual_stages=2)), {PIPELINE, VOCABULARY}),
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
