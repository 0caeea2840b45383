"""Schedules as tables, and the placement of layers on stages: plain integers, no devices."""

import dataclasses

import numpy as np
import pytest
import tiny

from moejax.config import LayerGroup, LayerSpec, MeshConfig, PipelineConfig
from moejax.errors import UserError
from moejax.schedule.table import make_table
from moejax.stages import layer_cost, plan_stages

SIZES = [(s, m, v) for s in (2, 4, 8) for m in (1, 3, 4, 8, 16) for v in (1, 2, 3)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "microbatches", "virtual"), SIZES)
def test_simulated_machine_runs_every_unit_once_on_what_has_arrived(stages, microbatches, virtual, schedule):
    """A machine with one register for what comes in: it notices a unit that starts before its input is there."""
    table = make_table(stages, microbatches, virtual, schedule)
    c, chunks = table.columns, stages * virtual
    done = {"forward": set(), "backward": set()}
    stash: list[dict] = [{} for _ in range(stages)]
    inbox: dict[str, list] = {"forward": [None] * stages, "backward": [None] * stages}
    gradients: dict[int, int] = {}
    for t in range(table.num_ticks):
        sent = {"forward": [None] * stages, "backward": [None] * stages}
        for s in range(stages):
            if c["forward_valid"][t, s]:
                m, k = int(c["forward_microbatch"][t, s]), int(c["forward_chunk"][t, s]) * stages + s
                assert k == 0 or inbox["forward"][s] == (m, k - 1)
                assert (k == 0) == bool(c["embed_valid"][t] and s == 0 and c["embed_microbatch"][t] == m)
                assert (m, k) not in done["forward"]
                done["forward"].add((m, k))
                assert int(c["forward_slot"][t, s]) not in stash[s]
                stash[s][int(c["forward_slot"][t, s])] = (m, k)
                sent["forward"][s] = (m, k)
                if k == chunks - 1:
                    assert c["head_valid"][t]
                    assert c["head_microbatch"][t] == m
                    gradients[int(c["head_slot"][t])] = m
        for s in range(stages):
            if c["backward_valid"][t, s]:
                m, k = int(c["backward_microbatch"][t, s]), int(c["backward_chunk"][t, s]) * stages + s
                if k == chunks - 1:
                    assert gradients.pop(int(c["grad_slot"][t])) == m
                else:
                    assert inbox["backward"][s] == (m, k + 1)
                assert stash[s].pop(int(c["backward_slot"][t, s])) == (m, k)
                assert (k == 0) == bool(c["unembed_valid"][t] and s == 0 and c["unembed_microbatch"][t] == m)
                done["backward"].add((m, k))
                sent["backward"][s] = (m, k)
        inbox = {
            "forward": [sent["forward"][s - 1] for s in range(stages)],
            "backward": [sent["backward"][(s + 1) % stages] for s in range(stages)],
        }
    everything = {(m, k) for m in range(microbatches) for k in range(chunks)}
    assert done["forward"] == done["backward"] == everything
    assert c["forward_valid"].sum() == c["backward_valid"].sum() == len(everything) == microbatches * chunks
    assert c["head_valid"].sum() == c["embed_valid"].sum() == c["unembed_valid"].sum() == microbatches
    assert not any(stash)
    assert not gradients


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "microbatches", "virtual"), [x for x in SIZES if x[1] % x[0] == 0])
def test_bubble_is_the_formula(stages, microbatches, virtual, schedule):
    table = make_table(stages, microbatches, virtual, schedule)
    idle = (stages - 1) / (virtual * microbatches + stages - 1)
    np.testing.assert_allclose(table.idle_share(), idle, rtol=1e-12)
    for half in ("forward", "backward"):
        busy = table.columns[f"{half}_valid"]
        ticks = int(busy.any(axis=1).sum())
        assert ticks == virtual * microbatches + stages - 1
        assert ticks * stages - int(busy.sum()) == (stages - 1) * stages  # idle half-ticks of all stages


def test_golden_values_of_the_report():
    """Section 6: P = 4, m = 8, v = 2 idles 3/19 of the time and keeps 11, 9, 7, 5 live copies on its stages."""
    table = make_table(4, 8, 2, "1f1b")
    np.testing.assert_allclose(table.idle_share(), 3 / 19, rtol=1e-12)
    assert table.live == (11, 9, 7, 5)


@pytest.mark.parametrize(("stages", "virtual"), [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2)])
def test_live_copies_do_not_grow_with_microbatches_in_1f1b_alone(stages, virtual):
    depths = [make_table(stages, m, virtual, "1f1b").depth for m in (2 * stages, 8 * stages)]
    assert depths == [(virtual + 1) * stages - 1] * 2
    assert make_table(stages, 8 * stages, virtual, "gpipe").depth == 8 * stages * virtual
    assert make_table(stages, 8 * stages, virtual, "1f1b").head_depth == 1


def placed(groups: tuple[LayerGroup, ...], stage: int, **pipeline):
    run = tiny.config(model=dataclasses.replace(tiny.MODEL, layers=groups))
    return plan_stages(dataclasses.replace(run, mesh=MeshConfig(stage=stage), pipeline=PipelineConfig(**pipeline)))


DENSE, MOE = LayerSpec("dense"), LayerSpec("moe")


def test_equal_layers_are_shared_evenly():
    stages = placed((LayerGroup(58, (MOE,)),), 8)
    assert sorted(len(chunk) for chunk in stages.chunks) == [7] * 6 + [8] * 2
    assert stages.per_chunk == (8,)
    assert sum(slot >= 0 for row in stages.slots[0] for slot in row) == 58


def test_interleaved_chunks_go_round():
    stages = placed((LayerGroup(8, (MOE,)),), 2, virtual_stages=2)
    assert stages.slots == (((0, 1, 4, 5), (2, 3, 6, 7)),)


def test_dense_prefix_is_weighed_by_its_work():
    run = tiny.config(model=dataclasses.replace(tiny.MODEL, layers=(LayerGroup(3, (DENSE,)), LayerGroup(13, (MOE,)))))
    cost = [layer_cost(run.model, spec, 16) for spec in run.model.specs]
    stages = placed(run.model.layers, 4)
    flat = [unit for chunk in stages.chunks for unit in chunk]
    assert flat == [(0, r) for r in range(3)] + [(1, r) for r in range(13)]
    best = min(
        max(sum(cost[a:b]) for a, b in zip((0, *cuts), (*cuts, 16), strict=True))
        for cuts in ((i, j, k) for i in range(1, 14) for j in range(i + 1, 15) for k in range(j + 1, 16))
    )
    np.testing.assert_allclose(max(stages.costs), best)


def test_given_cuts_are_taken():
    stages = placed((LayerGroup(1, (DENSE,)), LayerGroup(5, (MOE,))), 2, layers=(4, 2))
    assert [len(chunk) for chunk in stages.chunks] == [4, 2]
    assert stages.slots == (((0,), (-1,)), ((0, 1, 2), (3, 4, -1)))


@pytest.mark.parametrize(
    ("pipeline", "layers", "message"),
    [
        ({"layers": (3, 3)}, (LayerGroup(3, (DENSE, MOE)),), "layer 3 is inside a repetition"),
        ({"layers": (2, 2)}, (LayerGroup(6),), "must be 2 numbers whose sum is 6"),
        ({}, (LayerGroup(1, (MOE,) * 6),), "2 chunks need as many repetitions"),
    ],
)
def test_impossible_cuts_are_refused(pipeline, layers, message):
    with pytest.raises(UserError, match=message):
        placed(layers, 2, **pipeline)
