"""The real program and data, through Python and the command line: resume, another mesh, evaluation, exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moejax import Trainer, load_config
from moejax.cli.main import main
from moejax.config import CheckpointConfig, RunConfig
from moejax.errors import UserError
from moejax.train.guards import Preempted, TrainingStopped
from moejax.train.program import Program

TINY = """
mesh: {data: 2, expert: 4}
model:
  vocab_size: 260
  d_model: 16
  mlp_dim: 16
  layers: [{repeat: 2}]
  attention: {num_heads: 2, num_kv_heads: 1, head_dim: 8}
  moe: {num_experts: 4, top_k: 2, expert_dim: 16}
  mtp: 1
  dtype: float32
data: {sequence_length: 16, batch_size: 16, heldout_fraction: 0.2}
train: {steps: 6}
eval: {every: 3, batches: 2}
checkpoint: {every: 2}
log: {every: 1}
"""
TIMES = ("tokens_per_second", "step_seconds")
_programs: dict[str, Program] = {}


def _program(config, mesh):
    """The program of a configuration; runs that differ in their folder alone share it, so it compiles once."""
    key = repr(replace(config, run=RunConfig(), checkpoint=CheckpointConfig()))
    return _programs.setdefault(key, Program(config, mesh))


def _untimed(rows):
    return [{k: v for k, v in row.items() if k not in TIMES and not k.startswith("host_seconds/")} for row in rows]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A configuration file and the options that give it a corpus."""
    folder = tmp_path_factory.mktemp("settings")
    (folder / "tiny.yaml").write_text(TINY)
    lines = [
        json.dumps({"text": f"{i} is {'odd' if i % 2 else 'even'}, and its square is {i * i}"}) for i in range(400)
    ]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    return folder / "tiny.yaml", [f"data.corpus={folder / 'corpus.jsonl'}", f"data.cache={folder / 'cache'}"]


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory):
    """An uninterrupted run: its folder and rows."""
    root = tmp_path_factory.mktemp("whole")
    config = load_config(settings[0], [*settings[1], f"run.root={root}", "run.name=whole"])
    return root / "whole", Trainer(config, make_program=_program).run()


def test_rows_have_every_key(whole):
    keys = {"step", "loss", "ce_loss", "balance_loss", "z_loss", "grad_norm", "learning_rate", "tokens"}
    keys |= {"tokens_per_second", "step_seconds", "skipped_steps"}
    keys |= {"moe/requested_max_over_mean", "moe/dropped_fraction", "moe/dead_experts", "mtp_loss"}
    _, rows = whole
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(keys <= row.keys() for row in rows)
    assert [row["step"] for row in rows if {"eval/loss", "eval/bits_per_byte"} <= row.keys()] == [3, 6]
    assert abs(rows[0]["ce_loss"] - np.log(260)) < 0.2
    assert (
        0.8 * np.log(260) < rows[0]["mtp_loss"] < np.log(260)
    )  # documents and rows end before their last tokens' target
    assert [len(row["moe/requested"]) for row in rows] == 6 * [3]
    assert rows[-1]["loss"] < rows[0]["loss"]


class _Signalled:
    """The program, with SIGTERM on its way when step `at` is taken."""

    def __init__(self, config, mesh, at):
        self._program, self._left = _program(config, mesh), at

    def __getattr__(self, name):
        return getattr(self._program, name)

    @property
    def compiled_step(self):
        return self

    def __call__(self, state, batch):
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGTERM)
        return self._program.compiled_step(state, batch)


def _interrupted(settings, root, *options):
    """A run that saved after step 3 and left; returns its configuration."""
    config = load_config(settings[0], [*settings[1], f"run.root={root}", "run.name=cut", *options])
    with pytest.raises(Preempted, match="step 3 of 6"):
        Trainer(config, make_program=lambda config, mesh: _Signalled(config, mesh, 3)).run()
    return config


def test_resumed_run_is_bitwise_the_uninterrupted_one(settings, whole, tmp_path):
    config = _interrupted(settings, tmp_path)
    assert _untimed(Trainer(config, make_program=_program).run()) == _untimed(whole[1])


def test_resumed_on_one_device_with_another_gather_mode(settings, whole, tmp_path):
    _interrupted(settings, tmp_path)
    options = [*settings[1], f"run.root={tmp_path}", "run.name=cut", "mesh.data=1", "mesh.expert=1"]
    rows = Trainer(load_config(settings[0], [*options, "weights.gather=layer"])).run()
    np.testing.assert_allclose([r["loss"] for r in rows], [r["loss"] for r in whole[1]], rtol=1e-5)


def test_pipelined_run_resumed_without_stages(settings, whole, tmp_path):
    stages = ["mesh.stage=2", "mesh.data=2", "mesh.expert=2", "train.microbatches=2"]
    _interrupted(settings, tmp_path, *stages)
    config = load_config(settings[0], [*settings[1], f"run.root={tmp_path}", "run.name=cut"])
    rows = Trainer(config, make_program=_program).run()
    np.testing.assert_allclose([r["loss"] for r in rows], [r["loss"] for r in whole[1]], rtol=1e-5)
    assert rows[2]["eval/loss"] == pytest.approx(whole[1][2]["eval/loss"], rel=1e-5)  # evaluated in the pipeline


def test_eval_verb_repeats_the_last_evaluation(whole, capsys, tmp_path):
    """On a folder that was moved, too."""
    folder, rows = whole
    moved = tmp_path / "moved"
    os.symlink(folder, moved)
    assert main(["eval", str(moved), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == 6
    for key in ("eval/loss", "eval/bits_per_byte"):
        assert result[key] == pytest.approx(rows[-1][key], rel=1e-6)


def test_generate_verb_needs_no_mtp(whole, capsys):
    assert main(["generate", str(whole[0]), "--prompt", "7 is", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("7 is")


def test_eval_verb_without_a_checkpoint(settings, tmp_path, capsys):
    args = [str(settings[0]), f"--run.root={tmp_path}", *(f"--{option}" for option in settings[1])]
    assert main(["eval", *args]) == 2
    assert "holds no complete checkpoint" in capsys.readouterr().err


def test_train_verb_on_a_complete_run_and_on_one_of_another_model(whole, capsys):
    folder, _ = whole
    again = ["train", str(folder / "config.yaml")]
    assert main(again) == 0
    assert "complete" in capsys.readouterr().out
    assert main([*again, "--model.moe.num_experts=8"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "model.moe.num_experts: 4 -> 8" in error
    assert "params/groups_0/" in error


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (TrainingStopped("three in a row"), 3),
        (Preempted(signal.SIGTERM, "saved"), 75),
        (Preempted(signal.SIGINT, "saved"), 130),
        (UserError("no space left"), 2),
    ],
)
def test_exit_codes_of_the_train_verb(settings, tmp_path, monkeypatch, capsys, ending, code):
    def run(self):
        raise ending

    monkeypatch.setattr(Trainer, "run", run)
    assert main(["train", str(settings[0]), f"--run.root={tmp_path}"]) == code
    assert str(ending) in capsys.readouterr().err


@pytest.mark.slow
def test_killed_and_resumed_with_launch_local(settings, tmp_path):
    """`launch local`: a killed process ends the other within 30 s, and the resumed run equals one process of 8."""
    command = [sys.executable, "-m", "moejax"]
    train = ["train", str(settings[0]), f"--run.root={tmp_path}", "--train.steps=12", *(f"--{o}" for o in settings[1])]
    launch = [*command, "launch", "local", "--processes", "2", "--", *train, "--run.name=two"]
    subprocess.run([*command, *train, "--run.name=one"], check=True, timeout=600)
    metrics = tmp_path / "two/metrics.jsonl"
    group = subprocess.Popen(launch)
    while not (metrics.exists() and metrics.read_text().count("\n") >= 5):
        assert group.poll() is None
        time.sleep(0.01)
    os.kill(_children(group.pid)[-1], signal.SIGKILL)
    died = time.monotonic()
    assert group.wait(60) != 0
    assert time.monotonic() - died < 30
    subprocess.run(launch, check=True, timeout=600)
    one, two = (_losses(tmp_path / name) for name in ("one", "two"))
    assert len(one) == 12
    np.testing.assert_allclose(two, one, rtol=1e-6)


def _children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
