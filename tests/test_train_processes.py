"""Whole processes: killed at any moment and started again, two that train together, one that dies.

The loop, the checkpoints and the files are the real ones; the model is the toy one, so that a process takes seconds.
"""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

TOY = Path(__file__).with_name("train_toy.py")
STEPS = 12


def _start(root, *overrides, kill="", processes=1, rank=0, port=0):
    env = {**os.environ, "TOY_KILL": kill, "PYTHONPATH": str(TOY.parent.parent), "PYTHONUNBUFFERED": "1"}
    env.pop("XLA_FLAGS", None)
    if processes > 1:
        env |= {"MOEJAX_COORDINATOR": f"127.0.0.1:{port}", "MOEJAX_NUM_PROCESSES": str(processes)}
        env |= {"MOEJAX_PROCESS_ID": str(rank)}
    command = [sys.executable, str(TOY), str(root), *overrides]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _run(root, *overrides, kill=""):
    process = _start(root, *overrides, kill=kill)
    out, _ = process.communicate(timeout=240)
    return process.returncode, out


def _pair(root, *overrides, kill=("", "")):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [_start(root, *overrides, kill=kill[rank], processes=2, rank=rank, port=port) for rank in range(2)]


def _losses(root):
    """Loss of every step, as exact as the file has it; no step twice."""
    rows = [json.loads(line) for line in (Path(root) / "toy/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    root = tmp_path_factory.mktemp("uninterrupted")
    code, out = _run(root)
    assert code == 0, out
    assert len(_losses(root)) == STEPS
    return _losses(root)


def test_kill_before_a_step_and_while_a_checkpoint_is_written(tmp_path, uninterrupted):
    """Killed after step 5 (checkpoint 4), then inside the save of step 8, then left to end: bitwise the same losses."""
    code, out = _run(tmp_path, kill="6")
    assert code == -signal.SIGKILL, out
    assert len(_losses(tmp_path)) >= 3
    code, out = _run(tmp_path, kill="seal:1")
    assert code == -signal.SIGKILL, out
    assert "going on from step 4" in out
    assert list((tmp_path / "toy/checkpoints").glob("8.*tmp*"))
    code, out = _run(tmp_path)
    assert code == 0, out
    assert "going on from step 4" in out
    assert _losses(tmp_path) == uninterrupted


def test_damage_inside_a_file_is_refused_and_the_advice_works(tmp_path, uninterrupted):
    """In a process of its own: Orbax abandons the other reads, which complain whenever they are collected."""
    code, out = _run(tmp_path, kill="10")
    assert code == -signal.SIGKILL, out
    newest = tmp_path / "toy/checkpoints/8"
    file = max((newest / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    file.write_bytes(bytes(file.stat().st_size))
    code, out = _run(tmp_path)
    assert code == 2, out
    assert re.search(rf"^error: {newest}: the checkpoint is damaged .*delete this folder", out, re.MULTILINE)
    shutil.rmtree(newest)
    code, out = _run(tmp_path)
    assert code == 0, out
    assert "going on from step 4" in out
    assert _losses(tmp_path) == uninterrupted


def test_two_processes_equal_one_and_one_that_dies_ends_the_other(tmp_path, uninterrupted):
    """Two processes of 4 devices: killed, gone within 30 s, started again, the losses of one process of 8."""
    pair = _pair(tmp_path, kill=("", "7"))
    killed, _ = pair[1].communicate(timeout=240)
    assert pair[1].returncode == -signal.SIGKILL, killed
    died = time.monotonic()
    out, _ = pair[0].communicate(timeout=240)
    assert time.monotonic() - died < 30
    assert pair[0].returncode != 0, out
    pair = _pair(tmp_path)
    outs = [process.communicate(timeout=240)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], "\n".join(outs)
    assert "going on from step 4" in outs[0]
    assert "step 12/12" in outs[0]
    assert "step 12/12" not in outs[1]
    np.testing.assert_allclose(_losses(tmp_path), uninterrupted, rtol=1e-6)


def test_signal_to_one_of_two_processes_saves_and_ends_both(tmp_path):
    pair = _pair(tmp_path, "train.steps=5000", "checkpoint.every=5000", "eval.every=5000")
    metrics = tmp_path / "toy/metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert all(process.poll() is None for process in pair)
        time.sleep(0.1)
    pair[1].send_signal(signal.SIGTERM)
    outs = [process.communicate(timeout=120)[0] for process in pair]
    assert [process.returncode for process in pair] == [75, 75], "\n".join(outs)
    steps = [path.name for path in (tmp_path / "toy/checkpoints").iterdir()]
    assert len(steps) == 1
    assert len(_losses(tmp_path)) == int(steps[0])
    assert f"step {steps[0]} of 5000 is saved" in outs[0]
    assert f"step {steps[0]} of 5000 is saved" in outs[1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_kill_at_random_moments(tmp_path, seed, uninterrupted):
    moments = random.Random(seed)
    for _ in range(20):
        code, out = _run(tmp_path, kill=f"after:{moments.uniform(1, 9)}")
        if code == 0:
            break
        assert code == -signal.SIGKILL, out
    else:
        code, out = _run(tmp_path)
        assert code == 0, out
    assert _losses(tmp_path) == uninterrupted
