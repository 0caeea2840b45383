"""The figures that anyone can run: what their runs differ in, and the files they leave."""

import csv
import dataclasses
from pathlib import Path

import pytest
import tiny

from moejax.cli.main import main
from moejax.config import MoEConfig
from moejax.plan.figures import accumulation_runs, capacity_runs, measure_runs, plan_run, retained
from moejax.plan.parameters import module_counts
from moejax.plan.target import read_target

CONFIG = str(Path(__file__).parent.parent / "configs" / "bench-capacity.yaml")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_capacity_varies_one_factor_at_a_time() -> None:
    base = tiny.config(1, 8, 2, moe=MoEConfig("padded", 1.5))
    found = list(capacity_runs(base, [8, 32]))
    assert [(name, count) for name, count, _ in found][:5] == [
        ("dense", 0),
        ("step with EP", 8),
        ("step", 8),
        ("layer with EP", 8),
        ("layer (FSDP)", 8),
    ]
    runs = {(name, count): run for name, count, run in found}
    active = {key: module_counts(run).active for key, run in runs.items()}
    routers = 2 * 32  # layers x width: a router weight for each further expert
    assert active["step", 32] - active["step", 8] == routers * (32 - 8)
    assert active["step", 8] - active["dense", 0] == routers * 8 + 32 * (40 - 40) - 3 * 32 * (2 * 24 + 16 - 40)
    ep, no_ep, fsdp = runs["step with EP", 32], runs["step", 32], runs["layer (FSDP)", 32]
    assert (ep.mesh.expert, no_ep.mesh.expert, no_ep.mesh.data) == (8, 1, 8)
    assert dataclasses.replace(fsdp, weights=no_ep.weights) == no_ep
    assert dataclasses.replace(runs["layer with EP", 32], weights=ep.weights) == ep
    assert all(run.data == base.data and run.train == base.train for run in runs.values())


def test_accumulation_keeps_the_shape_of_a_microbatch() -> None:
    found = list(accumulation_runs(tiny.config(1, 8, 2), [1, 4]))
    assert [(name, turns, run.data.batch_size) for name, turns, run in found] == [
        ("step", 1, 16),
        ("step", 4, 64),
        ("layer", 1, 16),
        ("layer", 4, 64),
    ]


@pytest.mark.slow
def test_a_point_is_measured_on_this_machine() -> None:
    run = tiny.config(2, 4)
    (found,) = measure_runs([run], 1)
    assert found.tokens_per_second == pytest.approx(32 * 16 / found.step_seconds)
    assert plan_run(run, read_target("h200x8")).step_seconds < found.step_seconds


def test_planned_figures_have_the_reports_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "capacity", CONFIG, "--target", "b300x8", "--experts", "8", "128", "--out", str(tmp_path)]) == 0
    )
    rows = read(tmp_path / "capacity.csv")
    rows = [
        {**row, "experts": int(row["experts"]), "tokens_per_second": float(row["tokens_per_second"])} for row in rows
    ]
    share = retained(rows, "experts")
    assert share["step with EP"] > 0.8
    assert share["layer (FSDP)"] < 0.5
    assert (tmp_path / "capacity.svg").read_text().count("<polyline") == 5
    assert "of its tokens/s at experts 8 remain at 128" in capsys.readouterr().out
    small = ["--data.batch_size=16", "--train.microbatches=2"]  # one sequence a device and microbatch
    line = ["bench", "accumulation", CONFIG, "--target", "b300x8", "--microbatches", "1", "16", "--out", str(tmp_path)]
    assert main(line + small) == 0
    speed = [float(row["tokens_per_second"]) for row in read(tmp_path / "accumulation.csv")]
    assert speed[1] / speed[0] > 1.3 > speed[3] / speed[2]


def test_roofline_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "roofline", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "308 tokens (dense), 5,217 tokens (experts)" in out
    assert "weight reads 16x, input reads 4x, output writes 4x, hidden writes and reads 1x" in out
    assert len(read(tmp_path / "roofline.csv")) == 13
    assert (tmp_path / "roofline.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["roofline", "--top-k", "0"], "0: must be a whole number greater than zero"),
        (["roofline", "--experts", "4", "--top-k", "8"], "--top-k=8: must be at most --experts=4"),
        (["capacity", CONFIG, "--steps", "x"], "x: must be a whole number greater than zero"),
        (["accumulation", CONFIG, "--microbatches", "2", "-1"], "-1: must be a whole number greater than zero"),
    ],
)
def test_bad_numbers_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
