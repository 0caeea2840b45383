"""Recomputation: every policy gives the same gradients; memory and repeated exchanges are as documented."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from moejax.config import LayerGroup, LayerSpec, MeshConfig, RematConfig
from moejax.errors import UserError
from moejax.model.recompute import policy
from moejax.plan.hlo import collectives

ON_DEVICE = ("none", "attention", "experts", "save_exchange", "full")
MODEL = dataclasses.replace(tiny.MODEL, layers=(LayerGroup(1, (LayerSpec("dense"),)), LayerGroup(4)))


def run(name: str, **changes):
    base = dataclasses.replace(tiny.config(), model=MODEL, mesh=MeshConfig(expert=2), remat=RematConfig(name))  # type: ignore[arg-type]
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="module")
def steps():
    """Of each policy: gradients, temporary bytes, and how often rows cross in forward, backward and repetition."""
    found = {}
    for name in ON_DEVICE:
        program = tiny.program(run(name))
        params, batch = program.init(0).params, program.put(tiny.batch(program.config))
        compiled = jax.jit(program.gradients).lower(params, batch).compile()
        crossings = sum(c.tensors for c in collectives(str(compiled.as_text())) if c.kind == "all-to-all")
        memory = compiled.memory_analysis()
        assert memory is not None
        found[name] = (
            jax.device_get(compiled(params, batch)[0]),
            memory.temp_size_in_bytes,
            crossings,
        )
    return found


@pytest.mark.parametrize("name", ON_DEVICE[1:])
def test_gradients_do_not_depend_on_the_policy(steps, name):
    for got, want in zip(jax.tree.leaves(steps[name][0]), jax.tree.leaves(steps["none"][0]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


def test_memory_falls_in_the_documented_order(steps):
    memory = {name: found[1] for name, found in steps.items()}
    assert memory["none"] > max(memory["attention"], memory["experts"]), memory
    assert min(memory["attention"], memory["experts"]) > memory["save_exchange"] > memory["full"], memory


def test_only_full_repeats_the_exchange(steps):
    layers = MODEL.num_moe_layers
    assert {name: found[2] for name, found in steps.items()} == {
        **dict.fromkeys(ON_DEVICE[:-1], 4 * layers),  # dispatch and combine, forward and backward
        "full": 5 * layers,  # and dispatch again; backward needs no combined rows
    }


def test_the_chosen_experts_are_saved_by_every_policy():
    """A choice that is made twice could break a tie another way; a repeated choice shows as a second top_k."""
    counts = {}
    for name in (*ON_DEVICE, "offload"):
        program = tiny.program(run(name))
        counts[name] = str(
            jax.make_jaxpr(program.gradients)(program.abstract_state.params, program.abstract_batch)
        ).count("top_k[")
    assert counts["none"] > 0
    assert set(counts.values()) == {counts["none"]}, counts


def test_each_group_can_have_its_policy():
    one = run("none", remat=RematConfig(groups=("full", "save_exchange")))
    assert [one.remat.of(group) for group in range(2)] == ["full", "save_exchange"]
    groups = tiny.program(one).decoder.groups
    assert [group.remat for group in groups.values()] == ["full", "save_exchange"]


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        ({"groups": ("full",)}, "must be 2 policies"),
        ({"policy": "full", "groups": ("full", "none")}, "left out: remat.groups is given"),
    ],
)
def test_ineffective_policies_are_refused(remat, message):
    with pytest.raises(UserError, match=message):
        run("none", remat=RematConfig(**remat))


def test_offload_keeps_exchanged_rows_on_the_host():
    program = tiny.program(run("offload"))
    text = str(jax.make_jaxpr(program.gradients)(program.abstract_state.params, program.abstract_batch))
    assert text.count("<host>") > 0
    assert "<host>" not in str(
        jax.make_jaxpr(tiny.program(run("save_exchange")).gradients)(
            program.abstract_state.params, program.abstract_batch
        )
    )
    assert callable(policy("offload"))
