"""Estimated memory of pipelines and sharded sequences against the compiler's figure."""

import dataclasses

import pytest
import tiny

from moejax.config import Config, ContextConfig, LayerGroup, LayerSpec, MeshConfig, PipelineConfig, RematConfig
from moejax.plan.activations import layer_bytes
from moejax.plan.compile import Compiled, compile_step
from moejax.plan.memory import memory
from moejax.plan.report import make_report, traffic_difference
from moejax.plan.search import HEADROOM, evaluate, largest_microbatch
from moejax.plan.show import show_report
from moejax.plan.target import read_target
from moejax.plan.tensors import tensors

EXPERTS = (LayerGroup(8),)
MIXED = (LayerGroup(1, (LayerSpec("dense"),)), LayerGroup(7))


def configuration(mesh: MeshConfig, layers: tuple[LayerGroup, ...], remat: str, **sections) -> Config:
    """Two sequences of 64 tokens for each device and microbatch, of a model somewhat wider than the tiny one."""
    pipelined = mesh.stage > 1
    run = tiny.config(model=dataclasses.replace(tiny.MODEL, d_model=64, mlp_dim=128, layers=layers))
    turns = 8 if pipelined else 1
    return dataclasses.replace(
        run,
        mesh=mesh,
        remat=RematConfig(remat),  # type: ignore[arg-type]
        train=dataclasses.replace(run.train, microbatches=turns),
        data=dataclasses.replace(
            run.data, batch_size=2 * mesh.data * mesh.expert * turns, sequence_length=64 * mesh.context
        ),
        **sections,
    )


GPIPE, VIRTUAL = PipelineConfig("gpipe"), PipelineConfig(virtual_stages=2)
CASES = {
    "1f1b": configuration(MeshConfig(stage=2, expert=2), EXPERTS, "save_exchange"),
    "gpipe": configuration(MeshConfig(stage=4, expert=2), EXPERTS, "full", pipeline=GPIPE),
    "interleaved": configuration(MeshConfig(stage=2, expert=2), EXPERTS, "save_exchange", pipeline=VIRTUAL),
    "context": configuration(MeshConfig(expert=2, context=2), EXPERTS, "save_exchange"),
}
MORE = {
    "1f1b": configuration(MeshConfig(stage=2, expert=2), MIXED, "save_exchange"),
    "none": configuration(MeshConfig(stage=2, expert=2), MIXED, "none"),
    "full": configuration(MeshConfig(stage=2, data=2, expert=2), MIXED, "full"),
    "four": configuration(MeshConfig(stage=4, expert=2), MIXED, "save_exchange"),
    "gpipe": configuration(MeshConfig(stage=2, expert=2), MIXED, "save_exchange", pipeline=GPIPE),
    "interleaved": configuration(MeshConfig(stage=2, expert=2), MIXED, "full", pipeline=VIRTUAL),
    "ring": configuration(MeshConfig(expert=2, context=2), MIXED, "full", context=ContextConfig("ring")),
}


def assert_close(run: Config) -> None:
    compiled = compile_step(run, read_target("cpu"))
    estimate = sum(memory(run, tensors(run), "cpu").values())
    assert estimate == pytest.approx(compiled.peak, rel=0.15)


@pytest.mark.parametrize("name", CASES)
def test_memory_is_the_compilers(name: str) -> None:
    assert_close(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_memory_of_more_layouts_is_the_compilers(name: str) -> None:
    assert_close(MORE[name])


@pytest.mark.parametrize(
    ("times", "line"), [(1.0, "within 0.0%"), (1.14, "12.3% below"), (1.2, "warning: "), (0.8, "warning: ")]
)
def test_a_large_difference_is_a_warning(times: float, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = CASES["1f1b"]
    peak = round(times * sum(memory(run, tensors(run)).values()))
    show_report(make_report(run, None, Compiled(1.0, peak, 0, 0, 0, None, ())))
    out = capsys.readouterr().out
    assert line in out
    assert ("warning" in out) == (line == "warning: ")


def test_layers_of_a_sharded_vocabulary_are_measured():
    whole, sharded = (layer_bytes(configuration(MeshConfig(model=m), EXPERTS, "full"))[0] for m in (1, 2))
    assert whole / 2 < sharded < whole


def test_largest_microbatch_fits_and_one_sequence_more_does_not() -> None:
    run, target = tiny.config(2, 4, 2), read_target("h200x8")

    def peak(rows: int) -> int:
        return evaluate(dataclasses.replace(run, data=dataclasses.replace(run.data, batch_size=16 * rows)), target).peak

    room = dataclasses.replace(target, memory=(peak(11) + peak(12)) / 2 / HEADROOM)
    assert largest_microbatch(run, room) == 11
    assert largest_microbatch(run, dataclasses.replace(target, memory=peak(1) / 2)) == 0


def test_traffic_that_differs_is_named() -> None:
    def sizes(loss: int, gradients: int, tensors: int = 3) -> dict[str, dict[str, float]]:
        return {"loss": {"tensors": 3, "bytes": loss}, "gradient reduce": {"tensors": tensors, "bytes": gradients}}

    formula = sizes(40, 800)
    assert "on the tensors and bytes of every class" in traffic_difference(formula, sizes(40, 800))
    assert "some tensors of loss and gradient reduce as one" in traffic_difference(formula, sizes(20, 820))
    assert "some tensors of gradient reduce as one" in traffic_difference(formula, sizes(40, 800, 2))
    assert traffic_difference(formula, sizes(40, 808)).endswith("gradient reduce +0 tensors, +8 bytes (+1.00%)")
    assert traffic_difference(formula, sizes(40, 800, 4)).endswith("gradient reduce +1 tensors, +0 bytes (+0.00%)")
