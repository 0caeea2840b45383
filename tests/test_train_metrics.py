"""The files that metrics go to, and what a resumed run finds in them."""

import importlib
import json
import sys
from typing import Any

import numpy as np
import pytest
from train_toy import toy_config

from moejax.errors import UserError
from moejax.train.folder import RunFolder
from moejax.train.metrics import MetricWriter, read_rows
from moejax.train.report import Report, seconds


def _writer(tmp_path, step=0, *overrides):
    config = toy_config(tmp_path, *overrides)
    folder = RunFolder(config)
    folder.make()
    return MetricWriter(config, folder, step), folder


def test_rows_are_on_disk_as_soon_as_they_are_written(tmp_path):
    writer, folder = _writer(tmp_path)
    writer.write({"step": 1, "loss": 2.5, "moe/dead_experts": 0})
    assert [json.loads(line) for line in folder.metrics.read_text().splitlines()] == writer.history
    assert writer.history == [{"step": 1, "loss": 2.5, "moe/dead_experts": 0}]
    writer.close()


def test_values_that_are_not_finite_become_null(tmp_path):
    writer, folder = _writer(tmp_path)
    writer.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "tokens": 3})
    writer.close()
    assert folder.metrics.read_text() == '{"step": 1, "loss": null, "grad_norm": null, "tokens": 3}\n'


def test_resuming_drops_rows_past_the_checkpoint_and_a_half_written_line(tmp_path):
    writer, folder = _writer(tmp_path)
    for step in range(1, 6):
        writer.write({"step": step, "loss": 1.0 / step})
    writer.close()
    with folder.metrics.open("a") as file:
        file.write('{"step": 6, "lo')
    resumed, _ = _writer(tmp_path, 3)
    assert [row["step"] for row in resumed.history] == [1, 2, 3]
    resumed.write({"step": 4, "loss": 7.0})
    resumed.close()
    assert read_rows(folder.metrics) == resumed.history == [
        {"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": 1 / 3}, {"step": 4, "loss": 7.0},
    ]  # fmt: skip


def test_tensorboard_holds_every_number(tmp_path):
    writer, folder = _writer(tmp_path)
    writer.write({"step": 4, "loss": 2.5, "eval/loss": 1.25, "grad_norm": float("nan"), "counts": np.ones((2, 2))})
    writer.close()
    (file,) = folder.tensorboard.glob("events*")
    assert {(tag, step): value for tag, step, value in _scalars(file)} == {("loss", 4): 2.5, ("eval/loss", 4): 1.25}


Event = vars(importlib.import_module("tensorboardX.proto.event_pb2"))[
    "Event"
]  # made at run time, so no checker sees it


def _events(path):
    """TFRecord: length (8 bytes), checksum (4), event, checksum (4)."""
    data = path.read_bytes()
    while data:
        length = int.from_bytes(data[:8], "little")
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def _scalars(path):
    return [(value.tag, event.step, value.simple_value) for event in _events(path) for value in event.summary.value]


def test_tensorboard_hides_what_a_killed_session_wrote_past_the_checkpoint(tmp_path):
    _writer(tmp_path)[0].close()
    writer, folder = _writer(tmp_path, 4)
    writer.close()
    files = sorted(folder.tensorboard.glob("events*"))
    assert len(files) == 2
    starts = [(event.step, event.session_log.status) for event in _events(files[1]) if event.HasField("session_log")]
    assert starts == [(5, 1)]


def test_tensorboard_can_be_turned_off(tmp_path):
    writer, folder = _writer(tmp_path, 0, "log.tensorboard=false")
    writer.close()
    assert not folder.tensorboard.exists()


def test_wandb_asked_for_and_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        _writer(tmp_path, 0, "log.wandb=true")


def test_full_disk(tmp_path):
    writer, _ = _writer(tmp_path, 0, "log.tensorboard=false")
    lines: Any = writer._sinks[0]
    lines._file.close()
    lines._file = open("/dev/full", "a")  # noqa: SIM115
    for use in (lambda: writer.write({"step": 1, "loss": 1.0}), writer.close):
        with pytest.raises(UserError, match="metrics.jsonl: no space left on the disk"):
            use()


def test_folder_that_may_not_be_written_to(tmp_path, monkeypatch):
    folder = RunFolder(toy_config(tmp_path))

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(UserError, match="set run.root to your own folder"):
        folder.make()


def test_progress_is_plain_lines_away_from_a_terminal(tmp_path, capsys):
    with Report(toy_config(tmp_path), 0, quiet=False) as report:
        report.row({"step": 1, "loss": 5.0, "tokens_per_second": 12345.6, "step_seconds": 20.0})
        report.row(
            {
                "step": 6,
                "loss": 4.0,
                "tokens_per_second": 200.0,
                "step_seconds": 10.0,
                "eval/loss": 3.0,
                "eval/bits_per_byte": 2.5,
            }
        )
        report.row({"step": 7, "loss": None, "tokens_per_second": 200.0, "step_seconds": 10.0})
    assert capsys.readouterr().out.splitlines() == [
        "step 1/12  loss 5.0000  12,346 tokens/s  - left",
        "step 6/12  loss 4.0000  200 tokens/s  0:01:00 left",
        "step 6: held-out loss 3.0000, 2.5000 bits per byte",
        "step 7/12  loss not finite  200 tokens/s  0:00:50 left",
    ]


def test_progress_bar_on_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with Report(toy_config(tmp_path), 0, quiet=False) as report:
        report.row({"step": 6, "loss": 4.0, "tokens_per_second": 200.0, "step_seconds": 10.0})
    out = capsys.readouterr().out
    assert "6/12" in out
    assert "loss 4.0000" in out
    assert "0:01:00 left" in out


def test_other_processes_show_nothing(tmp_path, capsys):
    with Report(toy_config(tmp_path), 0, quiet=True) as report:
        report.row({"step": 6, "loss": 4.0, "tokens_per_second": 200.0, "step_seconds": 10.0})
    assert capsys.readouterr().out == ""


def test_durations():
    assert [seconds(s) for s in (0, 59.2, 3600, 36000 + 61)] == ["0:00:00", "0:01:00", "1:00:00", "10:01:01"]
