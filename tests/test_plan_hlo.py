"""Collectives counted from compiled programs: the promises of `weights.gather`, and the counting itself."""

import dataclasses
from collections import Counter
from functools import cache
from importlib.util import find_spec
from typing import Any

import jax
import pytest
import tiny

from moejax.config import Config, LayerGroup, LayerSpec, MoEConfig, RematConfig, WeightsConfig
from moejax.plan.compile import compile_step
from moejax.plan.hlo import Collective, collectives, wire_fraction
from moejax.plan.moves import CLASSES, GATHER, LOSS, REDUCE, by_class, compiled_traffic
from moejax.plan.report import mesh_of
from moejax.plan.target import read_target
from moejax.plan.tensors import Tensor, tensors
from moejax.plan.traffic import step_traffic

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


def assert_formula_agrees(run: Config, found: list[Collective]) -> None:
    """Every class but the loss: operation, type, axes, number of tensors and bytes."""
    mesh = mesh_of(run)
    got = {move for move in compiled_traffic(found, mesh) if move.name != LOSS}
    want = set(step_traffic(run, tensors(run), "cpu"))
    assert got == want
    assert run.mesh.size == 1 or {move.name for move in want} >= {GATHER, REDUCE}
    loss = sum(move.bytes for move in compiled_traffic(found, mesh) if move.name == LOSS)
    assert loss < 4000


@pytest.mark.parametrize(
    ("gather", "microbatches"), [("step", 1), ("step", 4), ("microbatch", 4), ("layer", 1), ("layer", 4)]
)
def test_formula_agrees_with_the_compiled_step(gather: str, microbatches: int) -> None:
    assert_formula_agrees(configuration(gather, microbatches), compiled(gather, microbatches)[0])


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
    assert_formula_agrees(run, compile_collectives(run))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'moejax[tpu]'")
@pytest.mark.parametrize("case", [0, 1, 2, 3, 4, 5, 6, 10, 12, 13, 14, 15, 16])  # of `gather` XLA merges small sums
def test_formula_agrees_with_steps_compiled_for_tpu(case) -> None:
    data, expert, gather, microbatches, remat, moe = MANY[case]
    remats = RematConfig(remat)  # type: ignore[arg-type]
    run = configuration(gather, microbatches, data, expert, remat=remats, moe=moe)
    run = dataclasses.replace(run, model=dataclasses.replace(MODEL, dtype="bfloat16"))
    with jax.numpy_dtype_promotion("standard"):
        found = compile_step(run, read_target("v5e")).collectives
    mesh = mesh_of(run)
    got, want = by_class(compiled_traffic(found, mesh)), by_class(step_traffic(run, tensors(run), "tpu"))
    for name in set(CLASSES) - {LOSS}:  # operations may differ: small scatters and gathers become all-reduces
        assert got[name]["bytes"] == want[name]["bytes"], name
        if name == REDUCE:  # XLA takes small reductions out of a loop, and then reduces what the loop stacked
            assert 0 < got[name]["tensors"] <= want[name]["tensors"]
        else:
            assert got[name]["tensors"] == want[name]["tensors"], name


TEXT = """
HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %g = bf16[16,3]{1,0:T(8,128)(2,1)} all-gather(%x), replica_groups=[2,4]<=[4,2]T(1,0), metadata={op_name="a/gather"}
  %s = f32[2,3]{1,0} reduce-scatter(%y), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %v)
}

%inner (q: f32[4]) -> f32[4] {
  %r = (f32[4]{0}, f32[]) all-reduce(%a, %b), replica_groups={}, to_apply=%add
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]{0}) while(%t0), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %m = f32[8]{0} all-gather(%e), replica_groups=mesh['data'=4,'expert'=2] {'expert'}, dimensions={0}
  %i = f32[4]{0} call(%a), to_apply=%inner
  %st = ((f32[2]{0}, f32[6]{0}), (f32[4]{0}, f32[12]{0})) all-gather-start(%a, %b), replica_groups=[1,2]<=[2]
  %dn = (f32[4]{0}, f32[12]{0}) all-gather-done(%st)
  %a2 = (f32[3]{0}, f32[3]{0}) all-to-all(%c, %d), replica_groups={{0,2},{1,3}}
  %as = ((f32[5]{0}), f32[5]{0}) all-reduce-start(%e), replica_groups={{0,1}}, to_apply=%add
  %at = f32[6]{0} all-reduce-start(%e), replica_groups={{0,1}}, to_apply=%add
}
"""


def test_counting_follows_loops_calls_and_groups() -> None:
    found = collectives(TEXT)
    mesh = {"data": 4, "expert": 2}
    got = [(x.kind, x.dtype, x.shapes, x.times, x.group_size, x.axes(mesh), x.scope) for x in found]
    assert got == [
        ("all-gather", "bf16", ((16, 3),), 5, 4, ("data",), "a/gather"),
        ("reduce-scatter", "f32", ((2, 2, 3),), 5, 2, ("expert",), ""),
        ("all-gather", "f32", ((8,),), 1, 2, ("expert",), ""),
        ("all-reduce", "f32", ((4,), ()), 1, 0, ("data", "expert"), ""),
        ("all-gather", "f32", ((4,), (12,)), 1, 2, ("expert",), ""),
        ("all-to-all", "f32", ((2, 3),), 1, 2, ("data",), ""),
        ("all-reduce", "f32", ((5,),), 1, 2, ("expert",), ""),
        ("all-reduce", "f32", ((6,),), 1, 2, ("expert",), ""),
    ]
    assert [item.bytes for item in found] == [5 * 96, 5 * 48, 32, 20, 64, 24, 20, 24]
    assert found[0].wire_bytes == 5 * 96 * 3 / 4
    assert wire_fraction("all-reduce", 4) == 2 * wire_fraction("all-gather", 4) == 1.5


def test_a_loop_of_unknown_length_is_refused_only_around_collectives() -> None:
    with pytest.raises(ValueError, match="no known trip count"):
        collectives(TEXT.replace("known_trip_count", "other"))
    text = TEXT.replace("known_trip_count", "other").replace("all-gather(", "add(").replace("reduce-scatter(", "add(")
    assert len(collectives(text)) == 5


def test_a_loop_without_a_known_count_tells_it_by_its_condition() -> None:
    condition = """
%c (p: (s32[], f32[8])) -> pred[] {
  %k = s32[]{:T(128)} constant(7)
  %p = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %n = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%n, %k), direction=LT
}
"""
    text = TEXT.replace("known_trip_count", "other").replace("ENTRY", condition + "\nENTRY")
    assert [item.times for item in collectives(text)][:2] == [7, 7]
