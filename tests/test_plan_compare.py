"""Two runs compared, against curves whose answer is known."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import tiny

from moejax.cli.main import main
from moejax.configure import dump_config
from moejax.errors import UserError
from moejax.plan.compare import Curve, compare, read_curve
from moejax.plan.flops import training_flops
from moejax.plan.tensors import tensors


def write_run(folder: Path, losses: list[float], tokens: int, speed: float, run) -> str:
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(run))
    rows = [
        {"step": i + 1, "loss": loss, "tokens": tokens * (i + 1), "tokens_per_second": speed, "step_seconds": 1.0}
        for i, loss in enumerate(losses)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"eval/loss": 1.0}]))
    return str(folder)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    moe = tiny.config(2, 4)
    dense = tiny.config(2, 4, model=dataclasses.replace(tiny.MODEL, layers=tiny.MODEL.layers[:1]))
    a = write_run(tmp_path / "a", [5.0, 4.0, 3.0, 2.0], 100, 50.0, moe)
    b = write_run(tmp_path / "b", [5.0, 4.5, 4.0, 3.5, 3.0], 100, 100.0, dense)
    return a, b


def test_ratios_by_hand(runs: tuple[str, str]) -> None:
    a, b = map(read_curve, runs)
    found = compare(a, b, 3.5)
    assert found["a"]["tokens"] == 250
    assert found["b"]["tokens"] == 400
    assert found["a"]["seconds"] == 5
    assert found["b"]["seconds"] == 4
    assert found["rho_H"] == pytest.approx(5 / 4)
    ratios = found["ratios"]
    assert ratios["flops"] / ratios["flops_per_device_second"] == pytest.approx(found["rho_H"])
    assert found["a"]["flops"] == pytest.approx(
        250 * sum(training_flops(tiny.config(2, 4), tensors(tiny.config(2, 4))).values())
    )
    assert compare(a, b)["loss"] == 3.0


def test_auxiliary_losses_do_not_count(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [9.0, 8.0, 7.0], 100, 50.0, tiny.config(2, 4))
    path = Path(folder, "metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, cross_entropy in zip(rows, (5.0, 3.0, 2.0), strict=False):
        row["ce_loss"] = cross_entropy
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_curve(folder).at(4.0)["tokens"] == 150
    del rows[1]["ce_loss"]  # then the one loss that every row has
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_curve(folder).at(8.0)["tokens"] == 200


def test_a_curve_that_rises_again_counts_from_its_first_crossing() -> None:
    steps = np.arange(4.0)
    curve = Curve("x", 1, np.minimum.accumulate([4.0, 2.0, 3.0, 1.0]), steps, steps, steps)
    assert curve.at(2.0)["tokens"] == 1
    assert curve.at(1.5)["tokens"] == 2.5
    assert np.isnan(curve.at(0.5)["tokens"])


def test_command(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *runs, "--loss", "3.5"]) == 0
    assert "rho_H 1.250" in capsys.readouterr().out
    assert main(["compare", *runs, "--loss", "0.5"]) == 2
    assert "not reached by both" in capsys.readouterr().err
    assert main(["compare", *runs, "--smooth", "0"]) == 2
    assert "--smooth=0: must be at least 1" in capsys.readouterr().err


def test_no_run_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give the folder of a run"):
        read_curve(str(tmp_path))
