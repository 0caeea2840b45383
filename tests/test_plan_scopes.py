"""Formulas of the balance loss's scopes against compiled steps: sums of counts, and the forward pass ahead."""

import dataclasses

import pytest
import tiny
from test_plan_axes import assert_agrees

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
from moejax.plan.cost import step_cost
from moejax.plan.flops import forward_flops, tokens_per_step
from moejax.plan.moves import CONTEXT_CLASS, PIPELINE, TENSOR, VOCABULARY
from moejax.plan.target import read_target
from moejax.plan.tensors import tensors

DENSE, MOE = LayerSpec("dense"), LayerSpec("moe")
TWO = (LayerGroup(2, (DENSE,)), LayerGroup(2))
ONCE = (LayerGroup(2, (DENSE,)), LayerGroup(1))
"""XLA unrolls a loop of one turn, and leaves out its last experts ahead; a loop it leaves out as a whole."""

FLAT = MeshConfig(data=2, expert=4)


def configuration(
    scope: str, layers=TWO, mesh: MeshConfig = FLAT, gather: str = "step", mtp: int = 0, turns: int = 4, **sections
) -> Config:
    moe = dataclasses.replace(tiny.MODEL.moe, selection_bias=scope == "sequence_unbiased")
    run = tiny.config(
        microbatches=turns,
        model=dataclasses.replace(tiny.MODEL, layers=layers, mtp=mtp, moe=moe),
        loss=LossConfig(balance_scope=scope),  # type: ignore[arg-type]
        weights=WeightsConfig(gather),  # type: ignore[arg-type]
    )
    return dataclasses.replace(run, mesh=mesh, **sections)


def test_counting_ahead_gathers_and_exchanges_once_more() -> None:
    assert_agrees(configuration("global_batch", gather="layer"), set())


def test_counts_are_summed_in_every_microbatch() -> None:
    assert_agrees(configuration("accumulated", (LayerGroup(2),)), set())


CONTEXT, TENSORS, STAGES = (
    MeshConfig(data=2, expert=2, context=2),
    MeshConfig(data=2, expert=2, model=2),
    MeshConfig(stage=2, data=2, expert=2),
)
WIDE, DEEP = {TENSOR, VOCABULARY}, {PIPELINE, VOCABULARY}
FULL = RematConfig("full")
CASES = [
    (configuration("global_batch", ONCE, gather="layer"), set()),
    (configuration("global_batch", (LayerGroup(2), LayerGroup(2, (DENSE,))), gather="layer"), set()),
    (configuration("global_batch", (LayerGroup(1, (MOE, DENSE)),), gather="layer"), set()),
    (configuration("global_batch", (LayerGroup(2, (MOE, DENSE)),), gather="layer"), set()),
    (configuration("global_batch", gather="microbatch", mtp=2), set()),
    (configuration("global_batch", gather="layer", mtp=1), set()),
    (configuration("global_batch", ONCE, CONTEXT), {CONTEXT_CLASS}),
    (configuration("global_batch", mesh=CONTEXT, remat=FULL), {CONTEXT_CLASS}),
    (
        configuration("global_batch", mesh=MeshConfig(expert=2, context=4), context=ContextConfig("ring")),
        {CONTEXT_CLASS},
    ),
    (configuration("global_batch", mesh=TENSORS), WIDE),
    (configuration("global_batch", ONCE, TENSORS), WIDE),
    (configuration("global_batch", moe=MoEConfig("ragged", 1.25, deduplicate=True)), set()),
    (configuration("global_batch", moe=MoEConfig("gather", 1.25)), set()),
    (configuration("global_batch", mesh=STAGES), DEEP),
    (configuration("global_batch", mesh=MeshConfig(stage=2, context=2, expert=2)), DEEP | {CONTEXT_CLASS}),
    (configuration("global_batch", mesh=MeshConfig(stage=2, model=2, expert=2)), DEEP | {TENSOR}),
    (configuration("global_batch", turns=1, mtp=1), set()),
    (configuration("synchronized", mtp=1), set()),
    (configuration("synchronized", mesh=STAGES, mtp=2), DEEP),
    (configuration("accumulated", mesh=CONTEXT), {CONTEXT_CLASS}),
    (configuration("accumulated", mesh=STAGES), DEEP),
    (configuration("global_batch", mesh=STAGES, mtp=1), DEEP),
    (configuration("global_batch", mesh=CONTEXT, mtp=2), {CONTEXT_CLASS}),
    (configuration("sequence", mesh=CONTEXT, mtp=2, remat=FULL), {CONTEXT_CLASS}),
    (configuration("sequence_unbiased", mesh=CONTEXT), {CONTEXT_CLASS}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("run", "wanted"), CASES)
def test_scopes(run: Config, wanted: set[str]) -> None:
    assert_agrees(run, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        (configuration("sequence", ONCE, remat=FULL), set()),
        (configuration("sequence", ONCE, remat=FULL, moe=MoEConfig("gather", 1.25)), set()),
        (configuration("sequence", ONCE, remat=FULL, moe=MoEConfig("ragged", 1.25, deduplicate=True)), set()),
        (configuration("sequence", remat=FULL, mtp=1, turns=2), set()),
        (configuration("sequence", ONCE, TENSORS), WIDE),
        (configuration("sequence", ONCE, CONTEXT, remat=FULL), {CONTEXT_CLASS}),
        (
            configuration("sequence", (LayerGroup(1, (DENSE, MOE)), LayerGroup(1, (MOE, DENSE))), TENSORS, remat=FULL),
            WIDE,
        ),
    ],
)
def test_groups_of_one_repetition(run: Config, wanted: set[str]) -> None:
    assert_agrees(run, wanted)


def test_counting_ahead_takes_the_time_of_a_forward_pass_without_its_head() -> None:
    target = read_target("h200x8")
    runs = [configuration(scope) for scope in ("global_batch", "sequence")]
    ahead, now = (step_cost(run, tensors(run), target) for run in runs)
    parts = forward_flops(runs[0], tensors(runs[0]))
    flops = (sum(parts.values()) - parts["head"]) * tokens_per_step(runs[0]) / runs[0].mesh.size
    assert ahead.model == now.model
    assert ahead.taxes["recomputation"] - now.taxes["recomputation"] == pytest.approx(flops / ahead.peak)
    assert ahead.taxes["routing"] > now.taxes["routing"]
