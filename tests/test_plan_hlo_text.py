"""Counting collectives in the text of compiled programs."""

import pytest

from moejax.plan.hlo import collectives, wire_fraction
from moejax.plan.moves import compiled_traffic

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


def test_sums_merged_over_layers_count_as_what_they_were() -> None:
    text = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %m = (f32[3,8], f32[3,4], f32[8], f32[]) all-reduce(%a, %b, %c, %d), replica_groups={{0,1}}, to_apply=%add
  %n = s32[3,8] all-reduce(%e), replica_groups={{0,1}}, to_apply=%add
  %g = f32[3,8] all-gather(%f), replica_groups={{0,1}}, dimensions={0}
}
"""
    mesh = {"data": 2}
    moves = compiled_traffic(collectives(text), mesh, {(3, 8)})
    assert [(move.kind, move.dtype, move.tensors) for move in moves] == [
        ("all-reduce", "f32", 3 + 1 + 1 + 1),
        ("all-reduce", "s32", 1),
        ("all-gather", "f32", 1),
    ]
    assert [move.tensors for move in compiled_traffic(collectives(text), mesh)] == [4, 1, 1]


def test_what_sparse_cores_do_counts_once() -> None:
    """TPU7x: a start names the computation; its update and its end repeat the types."""
    text = """
%sparse (p: bf16[4,8]) -> bf16[16,8] {
  ROOT %g = bf16[16,8]{1,0} all-gather(%p), replica_groups=mesh['d'=4] {'d'}, metadata={op_name="jit(f)/gather"}
}, execution_thread="sparsecore"

ENTRY %main (a: bf16[4,8]) -> bf16[16,8] {
  %s = ((), (), (s32[9])) custom-call-start(), async_execution_thread="sparsecore", called_computations={%sparse}
  %u = ((bf16[4,8]), bf16[16,8], (s32[9])) custom-call-update(%s, %a)
  ROOT %e = bf16[16,8]{1,0} custom-call-done(%u), metadata={op_name="jit(f)/gather"}
}
"""
    [found] = collectives(text)
    assert (found.kind, found.shapes, found.times, found.group_size) == ("all-gather", ((16, 8),), 1, 4)
    assert found.scope == "jit(f)/gather"
