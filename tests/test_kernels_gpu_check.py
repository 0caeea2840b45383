"""`benchmarks/gpu_check.sh` and its programs where no GPU is: parts that fail or hang, and what they leave."""

import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from moejax.kernels import Kernel, Tiles

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"
PARTS = ["versions", "numerics", "layer_step", "kernels", "mosaic", "tune"]


def check(folder: Path, python: str, **environment: str) -> subprocess.CompletedProcess:
    fake = folder / "python"
    fake.write_text(f"#!/bin/bash\n{python}\n")
    fake.chmod(0o755)
    out = str(folder / "results")
    names = {"PATH": "/usr/bin:/bin", "PYTHON": str(fake), **environment}
    return subprocess.run(["bash", str(SCRIPT), out], env=names, cwd=folder, capture_output=True, text=True, timeout=60)


def test_every_part_runs_and_leaves_its_results(tmp_path):
    """One part is wrong, one crashes: the others' results are there, and the exit code tells."""
    done = check(
        tmp_path,
        """case "$*" in
        *numerics*) echo '{}' > "$2"; exit 1 ;;
        *tune*) kill -SEGV $$ ;;
        *bench*) mkdir -p "${@: -1}"; echo csv > "${@: -1}/kernels.csv" ;;
        *layer_step*) echo '{}' > "$2" ;;
        esac; echo "ran $1" """,
    )
    assert done.returncode == 1, done.stderr
    results = tmp_path / "results"
    codes = re.findall(r"^== (\w+): exit code (\d+)", (results / "summary.txt").read_text(), re.MULTILINE)
    assert codes == [(name, {"numerics": "1", "tune": "139"}.get(name, "0")) for name in PARTS]
    for name in ("numerics.json", "layer_step.json", "kernels.csv", "mosaic/kernels.csv", "versions.log", "tune.log"):
        assert (results / name).exists(), name


def test_a_part_that_hangs_is_stopped_and_time_is_kept(tmp_path):
    """It does not even listen to SIGTERM."""
    start = time.monotonic()
    done = check(tmp_path, "trap '' TERM; case \"$*\" in *numerics*) while :; do sleep 0.1; done ;; esac", LIMIT="2")
    assert done.returncode == 1
    assert time.monotonic() - start < 20  # 2 s and 2 s until it is killed, on a busy machine
    summary = (tmp_path / "results" / "summary.txt").read_text()
    assert "versions: exit code 0" in summary
    assert "numerics: exit code 137" in summary
    for name in PARTS[2:]:
        assert f"{name}: left out, no time" in summary


def test_limits_fit_into_eight_minutes():
    text = SCRIPT.read_text()
    limits = [int(number) for number in re.findall(r"^part \w+ (\d+) ", text, re.MULTILINE)]
    whole = int(re.search(r"LIMIT:-(\d+)", text)[1])  # type: ignore[index]
    assert len(limits) == len(PARTS)
    assert sum(limits) <= whole
    assert whole + 2 * len(PARTS) <= 480  # a part has two seconds to go


def program(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def numerics(monkeypatch, tmp_path):
    module = program("kernel_gpu_numerics")
    kernel = Kernel("gpu", Tiles(64, 64, 64, 4, 2), interpret=True)
    monkeypatch.setattr(module, "SHAPES", [(150, 40, 72, 3)])
    monkeypatch.setattr(module, "TOLERANCE", {"bfloat16": 4e-3})
    monkeypatch.setattr(module, "FFN", kernel)
    monkeypatch.setattr(module, "WAYS", {"table": kernel, "wrong": Kernel("padded", max_group_size=20)})
    monkeypatch.setattr(sys, "argv", ["numerics", str(tmp_path / "numerics.json")])
    return module


def test_numerics_tells_right_kernels_from_wrong_ones(numerics, tmp_path):
    assert numerics.main() == 1
    found = json.loads((tmp_path / "numerics.json").read_text())["checks"]
    assert [(c["name"].split()[0], c["good"]) for c in found] == [("table", True), ("expert", True), ("wrong", False)]
    assert set(found[0]["errors"]) == {"forward", "dgrad", "wgrad", "wgrad into float32"}
    assert set(found[1]["errors"]) == {"forward", "dgrad", "wgrad of up", "wgrad of down", "scale"}


def test_layer_step_tells_what_fails_and_times_the_rest(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["layer_step", str(tmp_path / "layer.json"), "--small"])
    module = program("kernel_layer_step")
    monkeypatch.setattr(module, "ROUNDS", 1)

    def fused(*args):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(module, "fused", fused)
    with jax.numpy_dtype_promotion("standard"):
        assert module.main() == 1
    found = json.loads((tmp_path / "layer.json").read_text())
    assert found["fused"] == {"error": "RuntimeError: out of registers"}
    assert all(found[name]["ms"] > 0 for name in ("composed", "dense", "training step"))
    assert found["training step"]["last loss"] < found["training step"]["first loss"]
