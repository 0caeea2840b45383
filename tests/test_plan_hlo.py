"""Collectives counted from compiled programs: the promises of `weights.gather`, and the counting itself."""

import dataclasses
from collections import Counter
from functools import cache

import pytest
import tiny

from moejax.config import LayerGroup, LayerSpec, RematConfig, WeightsConfig
from moejax.plan.hlo import Collective, collectives, wire_fraction
from moejax.plan.tensors import Tensor, tensors

LAYERS, MOE_LAYERS = 5, 3
MODEL = dataclasses.replace(tiny.MODEL, layers=(LayerGroup(2, (LayerSpec("dense", window=5),)), LayerGroup(3)))
"""Each group is repeated: XLA unrolls a loop of one turn, and keeps what it gathered for backward."""

MESH = {"stage": 1, "data": 2, "context": 1, "expert": 4, "model": 1}


@cache
def compiled(
    gather: str, microbatches: int, data: int = 2, expert: int = 4, remat: str = "none"
) -> tuple[list[Collective], list[Tensor]]:
    """Collectives of a training step that have more than one device to a group, and the parameters."""
    remats = RematConfig(remat)  # type: ignore[arg-type]
    weights = WeightsConfig(gather)  # type: ignore[arg-type]
    run = tiny.config(data, expert, microbatches, model=MODEL, weights=weights, remat=remats)
    program = tiny.program(run)
    text = program.train_step.lower(program.abstract_state, program.abstract_batch).compile().as_text()
    return [item for item in collectives(text) if item.group_size > 1], tensors(run)


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
    assert count(found, "all-to-all", backward=False) == 2 * MOE_LAYERS * microbatches
    assert count(found, "all-to-all", backward=True) == 2 * MOE_LAYERS * microbatches
    assert count(found, "all-gather", "s32") == MOE_LAYERS * microbatches  # counts of rows, of each layer's plan


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
  %i = f32[4]{0} call(%a), to_apply=%inner
  %st = ((f32[2]{0}, f32[6]{0}), (f32[4]{0}, f32[12]{0})) all-gather-start(%a, %b), replica_groups=[1,2]<=[2]
  %dn = (f32[4]{0}, f32[12]{0}) all-gather-done(%st)
  %a2 = (f32[3]{0}, f32[3]{0}) all-to-all(%c, %d), replica_groups={{0,2},{1,3}}
}
"""


def test_counting_follows_loops_calls_and_groups() -> None:
    found = collectives(TEXT)
    mesh = {"data": 4, "expert": 2}
    got = [(x.kind, x.dtype, x.shapes, x.times, x.group_size, x.axes(mesh), x.scope) for x in found]
    assert got == [
        ("all-gather", "bf16", ((16, 3),), 5, 4, ("data",), "a/gather"),
        ("reduce-scatter", "f32", ((2, 2, 3),), 5, 2, ("expert",), ""),
        ("all-reduce", "f32", ((4,), ()), 1, 0, ("data", "expert"), ""),
        ("all-gather", "f32", ((4,), (12,)), 1, 2, ("expert",), ""),
        ("all-to-all", "f32", ((2, 3),), 1, 2, ("data",), ""),
    ]
    assert [item.bytes for item in found] == [5 * 96, 5 * 48, 20, 64, 24]
    assert found[0].wire_bytes == 5 * 96 * 3 / 4
    assert wire_fraction("all-reduce", 4) == 2 * wire_fraction("all-gather", 4) == 1.5


def test_a_loop_of_unknown_length_is_refused_only_around_collectives() -> None:
    with pytest.raises(ValueError, match="no known trip count"):
        collectives(TEXT.replace("known_trip_count", "other"))
    text = TEXT.replace("known_trip_count", "other").replace("all-gather(", "add(").replace("reduce-scatter(", "add(")
    assert len(collectives(text)) == 3
