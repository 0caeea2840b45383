"""The kernel benchmark and the table of kernels: files that they write, and choices that follow from them."""

import csv
import json
import os
import time
from importlib import resources
from itertools import chain, count
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from moejax.cli.bench import PRESETS, ROWS
from moejax.cli.main import main
from moejax.errors import UserError
from moejax.kernels import Backends, Kernel, Tiles, bench, target, tune
from moejax.kernels.table import ENVIRONMENT, Entry, choose, dump, entries, parse

SMALL = ["--groups", "2", "--width", "32", "--hidden", "16", "--loads", "skewed", "--rounds", "2", "--seconds", "0.01"]


def test_measures_and_draws(tmp_path, capsys):
    assert main(["bench", "kernels", "--rows", "8", *SMALL, "--backends", "padded", "--out", str(tmp_path)]) == 0
    with (tmp_path / "kernels.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {(line["direction"], line["candidate"]) for line in lines} == {
        (direction, name) for direction in bench.DIRECTIONS for name in ("dense", "auto", "padded")
    }
    for line in lines:
        work = (18 if line["direction"] == "ffn" else 4) * 16 * 32 * 16
        assert float(line["tflops"]) == pytest.approx(work / float(line["seconds"]) / 1e12)
        assert float(line["ratio_to_dense"]) > 0
    written = capsys.readouterr().out
    assert ("kernels.png" in written) == (tmp_path / "kernels.png").exists()


def test_nothing_is_begun_after_the_limit(tmp_path, capsys, monkeypatch):
    arguments = ["bench", "kernels", "--rows", "16", "8", *SMALL, "--backends", "padded", "--out", str(tmp_path)]
    clock = chain([0] * 4, count(1000))  # the start, a case and its first two directions, then the limit is over
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: next(clock), perf_counter=time.perf_counter))
    monkeypatch.setattr("moejax.cli.bench.time", bench.time)
    assert main(arguments) == 0
    with (tmp_path / "kernels.csv").open() as file:
        assert {(line["rows"], line["direction"]) for line in csv.DictReader(file)} == {
            ("8", "forward"),
            ("8", "dgrad"),
        }
    written = capsys.readouterr().out
    late = ", ".join(f"{rows} skewed {name}" for rows in (8, 16) for name in bench.DIRECTIONS)
    assert "left out, for want of time (--limit) or by failure: " + late.partition("dgrad, ")[2] in written
    assert main([*arguments, "--limit", "1e-9"]) == 2


def test_cpu_measures_all_rows_within_three_minutes():
    assert (min(ROWS), max(ROWS)) == (16, 32768)
    assert PRESETS["cpu"][-1] <= 120  # what has begun may take half a minute more, on a busy machine


def test_long_calls_are_timed_once():
    calls = []

    def slow(data):
        calls.append(1)
        time.sleep(0.05)

    bench.timed({"slow": slow}, None, 9, 0.001)
    assert len(calls) == 3  # to compile, to size the batch, and one round


def test_a_candidate_that_fails_is_left_out():
    def fails(data):
        raise ValueError("too large")

    with pytest.warns(UserWarning, match="broken is left out: ValueError: too large"):
        times = bench.timed({"broken": fails, "fine": lambda data: data}, jnp.ones(3), 2, 0.01)
    assert set(times) == {"fine"}


def test_tiles_that_do_not_compile_are_left_out(monkeypatch):
    case = bench.Case(4, 2, 8, 8, "float32", "uniform")
    monkeypatch.setitem(tune.TILES, "gpu", {"gmm": (Tiles(),), "wgrad": (Tiles(),)})
    with (
        pytest.warns(UserWarning, match="Tiles.* is left out: ValueError: Only interpret mode"),
        pytest.raises(UserError, match="none of the tiles of gpu runs in forward for 4 rows per expert"),
    ):
        tune.tune([case], "gpu", 1, 0.01)


def test_classes_of_rows_meet_at_their_geometric_mean(monkeypatch):
    small, large = Tiles(rows=8), Tiles(rows=32)
    monkeypatch.setattr(tune, "_best", lambda case, direction, *_: small if case.rows < 1000 else large)
    monkeypatch.setattr(tune, "operands", lambda case: {})
    cases = [bench.Case(rows, 2, 8, 8, "float32", "uniform") for rows in (4000, 10, 250)]
    found = tune.tune(cases, "cpu", 1, 0.01)
    classes = [(entry.direction, entry.min_rows, entry.max_rows, entry.tiles) for entry in found]
    expected = [(None, 1000, small), (1000, None, large)]
    assert classes == [(name, *rest) for name in ("forward", "dgrad", "wgrad") for rest in expected]
    late = tune.tune(cases, "cpu", 1, 0.01, deadline=0.0)  # the first class alone, open to both sides
    assert [(entry.min_rows, entry.max_rows) for entry in late] == [(None, None)] * 3


def test_tuned_table_is_used(tmp_path, monkeypatch):
    arguments = ["bench", "kernels", "--tune", "--rows", "4", "64", *SMALL, "--out", str(tmp_path)]
    assert main(arguments) == 0
    path = tmp_path / "kernel-table.json"
    tuned = parse(path.read_text(), "tuned")
    assert {entry.direction for entry in tuned} == {"forward", "dgrad", "wgrad"}
    monkeypatch.setenv(ENVIRONMENT, str(path))
    got = choose("forward", jnp.float32, 128, 2, None)
    assert got == Kernel("cpu", next(e.tiles for e in reversed(tuned) if e.direction == "forward"))
    assert choose("forward", jnp.bfloat16, 128, 2, None) == Kernel("cpu")  # nothing tuned: the shipped entry


@pytest.mark.parametrize("direction", bench.DIRECTIONS)
def test_dense_is_the_first_experts_matmul_without_a_copy_of_its_weights(direction):
    case = bench.Case(6, 3, 8, 4, "float32", "uniform")
    data = bench.operands(case)
    one = {**data, "sizes": jnp.array([18, 0, 0])}
    want = jax.tree.leaves(bench.grouped(direction, Backends.all("reference"))(one))
    got = jax.tree.leaves(bench.dense(direction)(data))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b[0] if b.ndim == 3 else b, rtol=1e-4, atol=1e-5)
    if direction != "ffn":  # which splits gate and up
        assert "slice" not in str(jax.make_jaxpr(bench.dense(direction))(data))


def test_peaks_are_those_of_the_plan(monkeypatch):
    texts = [file.read_text() for file in resources.files("moejax.plan").joinpath("targets").iterdir()]
    targets = [yaml.safe_load(text) for text in texts if "device_kind:" in text]
    peaks = {target["device_kind"]: float(target["peak"]["bfloat16"]) / 1e12 for target in targets}
    del peaks["cpu"]
    assert peaks.items() <= bench.PEAK_TFLOPS.items()
    monkeypatch.setitem(bench.PEAK_TFLOPS, jax.devices()[0].device_kind, 1e-3)
    case = bench.Case(6, 3, 8, 4, "bfloat16", "uniform")
    for found in bench.measure(case, [], 1, 0.001):
        assert found.percent_of_peak == pytest.approx(1e5 * found.tflops)


def test_imbalance_and_sizes():
    assert bench.imbalance(np.array([5, 5, 5])) == pytest.approx(0)
    assert bench.imbalance(np.array([9, 0, 0])) == pytest.approx(1)
    assert bench.imbalance(np.array([1, 1, 0, 0])) == pytest.approx(0.5)
    case = bench.Case(32, 8, 16, 16, "float32", "skewed")
    assert case.sizes().sum() == 256


def test_first_fitting_entry_wins(tmp_path, monkeypatch):
    tiles = Tiles(64, 64, 64)
    table = [
        Entry("TPU7x", "padded", max_rows=10, bounded=True),
        Entry("TPU7x", "tpu", "wgrad", "bfloat16", min_rows=100, tiles=tiles),
    ]
    path = tmp_path / "table.json"
    path.write_text(dump(table))
    assert parse(path.read_text(), "x") == tuple(table)
    monkeypatch.setenv(ENVIRONMENT, str(path))
    with target("tpu", "TPU7x"):
        assert choose("forward", jnp.bfloat16, 80, 8, 12) == Kernel("padded", max_group_size=12)
        assert choose("forward", jnp.bfloat16, 80, 8, None) == Kernel("tpu")  # no bound is known
        assert choose("wgrad", jnp.bfloat16, 800, 8, 12) == Kernel("tpu", tiles)
        assert choose("wgrad", jnp.float32, 800, 8, 12) == Kernel("tpu")
    with target("gpu", "NVIDIA H200"):
        assert choose("dgrad", jnp.bfloat16, 64 * 8, 8, None).tiles == Tiles(64, 128, 64, 4, 3)
    with target("cpu", "cpu"):
        assert choose("dgrad", jnp.bfloat16, 64 * 8, 8, None) == Kernel("cpu")


def test_bad_tables_and_kernels_say_so(tmp_path):
    with pytest.raises(UserError, match=r"no-such.json.*unset"):
        entries(os.fspath(tmp_path / "no-such.json"))
    wrong = (
        {"chip": "cpu"},
        {"tiles": 3},
        {"chip": "cpu", "backend": "gqu"},
        {"chip": "cpu", "backend": "xla", "tiles": {"rows": 64}},
        {"chip": "cpu", "backend": "cpu", "tiles": {"rows": 0}},
        {"chip": "cpu", "backend": "cpu", "direction": "backward"},
    )
    for text in ("[]", "{}", *(json.dumps({"entries": [entry]}) for entry in wrong)):
        with pytest.raises(UserError, match=r"kernel table here.*bench kernels --tune"):
            parse(text, "here")
    with pytest.raises(UserError, match="did you mean 'padded'"):
        Kernel("paded")
    with pytest.raises(UserError, match="leave them out"):
        Kernel("xla", tiles=Tiles())
    with pytest.raises(UserError, match="leave it out"):
        Kernel("cpu", max_group_size=3)
    with pytest.raises(UserError, match="max_group_size=0: must be greater than zero"):
        Kernel("padded", max_group_size=0)
    with pytest.raises(UserError, match="not Pallas"):
        Kernel("cpu", reverse=True)
    with pytest.raises(UserError, match="greater than zero"):
        Tiles(rows=0)
