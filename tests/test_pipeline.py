"""Pipeline and tensor parallelism: the step of one device, on meshes with stages and with sharded heads and widths."""

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import pipeline_cases
import pytest
import tiny
from hlo_order import unordered
from pipeline_cases import Case

from moejax.config import LayerGroup, LayerSpec, MeshConfig, PipelineConfig, RematConfig, TrainConfig, WeightsConfig
from moejax.errors import UserError
from moejax.plan.hlo import collectives
from moejax.plan.moves import COMBINE, DISPATCH, GATHER, PIPELINE, REDUCE, compiled_traffic
from moejax.plan.report import mesh_of
from moejax.schedule import pipeline
from moejax.schedule.table import make_table
from moejax.stages import plan_stages

CASES = {
    "unequal stages": Case(3, 2, mesh=(("expert", 2),)),
    "four stages, rows kept": Case(4, 4, remat="save_exchange", mesh=(("expert", 2),)),
    "interleaved, all forward first": Case(8, 2, "gpipe", 2, layers=8),
    "given cuts, counts so far": Case(4, 2, cuts=(1, 3), scope="accumulated", remat="full"),
    "ring and counts of the step": Case(
        2, 2, scope="global_batch", context="ring", mesh=(("context", 2), ("expert", 2))
    ),
    "with tensor parallelism": Case(2, 2, mesh=(("model", 2), ("expert", 2))),
    "tensor parallelism alone": Case(2, mesh=(("model", 2), ("context", 2), ("expert", 2)), context="ring"),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_those_of_one_device(name):
    found = pipeline_cases.worst(CASES[name])
    assert found["losses"] < 1e-5, found
    assert found["counts"] == 0, found
    assert found["gradients"] < 1e-5, found


@pytest.mark.slow
@pytest.mark.parametrize("share", range(8))
def test_product_of_all_sizes(share):
    """96 runs on 16 devices: stages, microbatches, virtual stages, expert ranks, schedules."""
    path = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, pipeline_cases.__file__, f"{share}/8"]
    lines = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 12
    assert all(line.startswith("ok") for line in lines), lines


@pytest.mark.slow
@pytest.mark.parametrize("context", ["ulysses", "ring"])
@pytest.mark.parametrize(
    "mesh",
    [
        {"stage": 2, "context": 2, "model": 2},
        {"stage": 2, "context": 2, "expert": 2},
        {"context": 4, "model": 2},
        {"context": 2, "model": 4},
        {"stage": 2, "model": 4},
        {"model": 4, "expert": 2},
    ],
)
def test_products_with_context_and_tensor(mesh, context, monkeypatch):
    heads = dataclasses.replace(tiny.MODEL.attention, num_heads=8, num_kv_heads=8, head_dim=4)
    monkeypatch.setattr(tiny, "MODEL", dataclasses.replace(tiny.MODEL, attention=heads))
    pipeline_cases.reference.cache_clear()
    kind = context if mesh.get("context", 1) > 1 else "ulysses"
    found = pipeline_cases.worst(
        Case(
            2,
            mesh.get("stage", 1),
            context=kind,
            mesh=tuple((axis, size) for axis, size in mesh.items() if axis != "stage"),
        )
    )
    pipeline_cases.reference.cache_clear()
    assert found["losses"] < 1e-5, found
    assert found["counts"] == 0, found
    assert found["gradients"] < 1e-5, found


def compiled(case: Case):
    program = tiny.program(case.config)
    return jax.jit(program.gradients).lower(program.abstract_state.params, program.abstract_batch).compile()


def moved(case: Case) -> Counter:
    """Collectives of the compiled gradients: (class, kind) to how often they run."""
    found: Counter = Counter()
    for move in compiled_traffic(collectives(str(compiled(case).as_text())), mesh_of(case.config)):
        found[move.name, move.kind] += move.tensors
    return found


@pytest.fixture(scope="module")
def counted() -> dict[int, Counter]:
    """Collectives by number of microbatches."""
    return {m: moved(Case(m, 2, virtual=2, layers=8, remat="save_exchange", mesh=(("expert", 2),))) for m in (4, 8)}


def test_one_message_a_half_tick_and_weights_move_once(counted):
    case = Case(4, 2, virtual=2, layers=8, mesh=(("expert", 2),))
    slots = plan_stages(case.config).per_chunk[1]
    for microbatches, found in counted.items():
        c = make_table(2, microbatches, 2, "1f1b").columns
        forward, backward = (int(c[f"{half}_valid"].any(axis=1).sum()) for half in ("forward", "backward"))
        assert found[PIPELINE, "collective-permute"] == forward + backward
        for name in (DISPATCH, COMBINE):  # forward, and its adjoint: recomputation repeats none
            assert found[name, "all-to-all"] == slots * (forward + backward)
    for key in [(GATHER, "all-gather"), (GATHER, "all-to-all"), (REDUCE, "reduce-scatter"), (REDUCE, "all-to-all")]:
        assert counted[4][key] == counted[8][key] > 5


@pytest.mark.parametrize(
    "case",
    [Case(1, 2, virtual=2), Case(2, 2, scope="global_batch")],
    ids=["phases of one tick", "counts of the step"],
)
def test_data_orders_all_reduces_of_branches(case):
    assert unordered(str(compiled(case).as_text())) == set()


def test_a_branch_beside_an_all_reduce_is_found(monkeypatch):
    monkeypatch.setattr(pipeline, "after", lambda done, tree: tree)
    assert unordered(str(compiled(Case(1, 2, virtual=2)).as_text()))


def test_memory_of_1f1b_does_not_grow_with_microbatches_that_of_gpipe_does():
    def temporaries(microbatches: int, schedule: str) -> int:
        run = Case(1, 2, schedule, layers=4, remat="full").config
        run = dataclasses.replace(
            run,
            data=dataclasses.replace(run.data, batch_size=2 * microbatches, sequence_length=64),
            train=TrainConfig(steps=2, microbatches=microbatches),
        )
        program = tiny.program(run)
        lowered = jax.jit(program.gradients).lower(program.abstract_state.params, program.abstract_batch)
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    small, large = (temporaries(m, "1f1b") for m in (8, 64))
    assert abs(large / small - 1) < 0.05, (small, large)
    assert temporaries(64, "gpipe") > 1.5 * large


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": WeightsConfig("layer")}, "weights.gather=layer: must be step with mesh.stage"),
        ({"remat": RematConfig("offload")}, "remat.policy=offload: must be another with mesh.stage"),
        ({"pipeline": PipelineConfig(virtual_stages=3)}, "4 layers cannot make 6 chunks"),
        ({"mesh": MeshConfig(), "pipeline": PipelineConfig("gpipe")}, "pipeline.schedule=gpipe: must be left out"),
    ],
)
def test_what_cannot_be_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(Case(4, 2).config, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk_norm": "full"}, "qk_norm=full is a norm over all heads"),
        ({"num_kv_heads": 1}, "kv_heads=1 is not divisible .* sharding.compute.kv_heads"),
    ],
)
def test_heads_that_cannot_be_sharded_are_refused(change, message):
    run = Case(2, mesh=(("model", 2),)).config
    attention = dataclasses.replace(run.model.attention, **change)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, attention=attention))
    with pytest.raises(UserError, match=message):
        tiny.program(run)


def test_patterns_of_several_layers_stay_whole():
    layers = (LayerGroup(4, (LayerSpec("moe"), LayerSpec("dense"))),)
    run = dataclasses.replace(Case(2, 2).config, model=dataclasses.replace(tiny.MODEL, layers=layers))
    stages = plan_stages(run)
    assert json.dumps(stages.chunks) == json.dumps([[[0, 0], [0, 1]], [[0, 2], [0, 3]]])
