"""The loop on the toy model: rows, evaluation, resuming, endings, refusals."""

import contextlib
import json
import math
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_toy import ToyLoader, toy_config, toy_program, toy_trainer

from moejax.configure import load_config
from moejax.errors import UserError
from moejax.train.checkpoint import Checkpoints
from moejax.train.guards import Preempted, TrainingStopped

KEYS = {"step", "loss", "ce_loss", "balance_loss", "z_loss", "grad_norm", "learning_rate", "tokens"}
KEYS |= {"tokens_per_second", "step_seconds", "skipped_steps", "moe/gerrymandering_alarms"}
TIMES = ("tokens_per_second", "step_seconds")
HOST = tuple(f"host_seconds/{part}" for part in ("data", "put", "dispatch", "wait", "log", "pause"))
KEYS |= set(HOST)
TOKENS_PER_STEP = 7 * 8 + 3


def _untimed(rows):
    return [{key: value for key, value in row.items() if key not in TIMES + HOST} for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted run of 12 steps: its folder and its rows."""
    root = tmp_path_factory.mktemp("finished")
    return root / "toy", toy_trainer(toy_config(root)).run()


def test_history_is_what_lies_in_the_file(finished):
    folder, rows = finished
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] == rows
    for row in rows:
        evaluated = row["step"] in (6, 12)
        assert row.keys() == KEYS | ({"eval/loss", "eval/bits_per_byte"} if evaluated else set())
        assert row["tokens"] == TOKENS_PER_STEP * row["step"]
        assert row["step_seconds"] > 0
        assert math.isclose(row["tokens_per_second"], TOKENS_PER_STEP / row["step_seconds"], rel_tol=1e-6)
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]


def test_folder_holds_configuration_versions_curves_and_checkpoints(finished):
    folder, _ = finished
    assert load_config(folder) == toy_config(folder.parent)
    assert {"jax", "optax", "python", "devices"} <= json.loads((folder / "versions.json").read_text()).keys()
    assert list((folder / "tensorboard").glob("events*"))
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"8", "12"}
    assert not list(folder.rglob("*.tmp"))


def test_evaluation_equals_numpy(finished, tmp_path):
    """Bits per byte: summed loss in bits over the bytes that valid targets stand for."""
    folder, rows = finished
    config = toy_config(folder.parent)
    program = toy_program(config)
    with contextlib.closing(Checkpoints(folder / "checkpoints", read_only=True)) as checkpoints:
        params = checkpoints.restore_params(12, program.abstract_state.params)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    total, tokens, num_bytes = 0.0, 0, 0
    for i in range(2):
        batch = ToyLoader(config, "heldout").batch(i)
        for row, column in zip(*np.nonzero(batch["segments"]), strict=True):
            x, target = p["embed"]["table"][batch["tokens"][row, column]], batch["targets"][row, column]
            for layer in range(2):
                hidden = np.tanh((x * p["groups_0"]["norm"][layer]) @ p["groups_0"]["experts"][layer].sum(0))
                x = x + np.pad(hidden, (0, x.size - hidden.size))
            logits = x @ p["head"]["kernel"]
            total += np.log(np.exp(logits).sum()) - logits[target]
            tokens, num_bytes = tokens + 1, num_bytes + target % 3
    assert tokens == 2 * TOKENS_PER_STEP
    assert math.isclose(rows[-1]["eval/loss"], total / tokens, rel_tol=1e-5)
    assert math.isclose(rows[-1]["eval/bits_per_byte"], total / math.log(2) / num_bytes, rel_tol=1e-5)


def test_complete_run_says_so_and_changes_nothing(finished, capsys):
    folder, rows = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert toy_trainer(toy_config(folder.parent)).run() == rows
    out = capsys.readouterr().out
    assert "complete" in out
    assert "--train.steps=24" in out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def test_longer_run_goes_on_where_it_stopped(tmp_path, capsys):
    options = ["optimizer.schedule=constant"]
    want = toy_trainer(toy_config(tmp_path / "one", *options)).run()
    first = toy_trainer(toy_config(tmp_path / "two", *options, "train.steps=5")).run()
    assert [row["step"] for row in first] == [1, 2, 3, 4, 5]
    rows = toy_trainer(toy_config(tmp_path / "two", *options)).run()
    assert [row["loss"] for row in rows] == [row["loss"] for row in want]
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in want]
    assert "going on from step 5" in capsys.readouterr().out


class _Wrapped:
    """The toy program with another `train_step`, a function of (step, inner train_step, state, batch)."""

    def __init__(self, program, train_step):
        self._program, self._train_step, self._step = program, train_step, 0

    def __getattr__(self, name):
        return getattr(self._program, name)

    @property
    def compiled_step(self):
        return self

    def __call__(self, state, batch):
        self._step += 1
        return self._train_step(self._step, self._program.compiled_step, state, batch)


def _signal_at(at, signum):
    def train_step(step, inner, state, batch):
        if step == at:
            signal.raise_signal(signum)
        return inner(state, batch)

    return lambda config, poison: _Wrapped(toy_program(config, poison), train_step)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signal_saves_and_the_next_session_equals_an_uninterrupted_run(finished, tmp_path, signum, code):
    _, want = finished
    handlers = signal.getsignal(signum)
    with pytest.raises(Preempted, match="step 7 of 12 is saved") as ending:
        toy_trainer(toy_config(tmp_path), program=_signal_at(7, signum)).run()
    assert ending.value.exit_code == code
    assert signal.getsignal(signum) is handlers
    rows = [json.loads(line) for line in (tmp_path / "toy/metrics.jsonl").read_text().splitlines()]
    assert _untimed(rows) == _untimed(want[:7])
    assert _untimed(toy_trainer(toy_config(tmp_path)).run()) == _untimed(want)


def test_another_mesh_goes_on_within_float32(finished, tmp_path):
    _, want = finished
    with pytest.raises(Preempted):
        toy_trainer(toy_config(tmp_path), program=_signal_at(5, signal.SIGTERM)).run()
    rows = toy_trainer(toy_config(tmp_path, "mesh.data=8", "mesh.expert=1")).run()
    np.testing.assert_allclose([r["loss"] for r in rows], [r["loss"] for r in want], rtol=1e-5)


def test_bad_steps_change_nothing_and_are_counted(tmp_path):
    rows = toy_trainer(toy_config(tmp_path), poison=(3, 4, 6, 7)).run()
    assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 2, 2, 3, 4, 4, 4, 4, 4, 4]
    assert [row["step"] for row in rows if row["loss"] is None] == [3, 4, 6, 7]
    assert all(math.isfinite(rows[i]["loss"]) for i in (4, 7, 8, 11))
    assert rows[-1]["tokens"] == 12 * TOKENS_PER_STEP


def test_three_bad_steps_in_a_row_stop_the_run(tmp_path):
    with pytest.raises(TrainingStopped, match="step 8: loss or gradient was not finite 3 times in a row") as ending:
        toy_trainer(toy_config(tmp_path, "checkpoint.every=100"), poison=(3, 4, 6, 7, 8)).run()
    assert ending.value.exit_code == 3
    rows = [json.loads(line) for line in (tmp_path / "toy/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 7
    assert not [path for path in (tmp_path / "toy/checkpoints").iterdir() if path.name.isdigit()]


def test_streak_between_logged_steps_stops_the_run_too(tmp_path):
    with pytest.raises(TrainingStopped, match="step 4"):
        toy_trainer(
            toy_config(tmp_path, "log.every=100", "eval.every=100", "checkpoint.every=100"), poison=(2, 3, 4)
        ).run()


def test_rows_are_those_of_logged_and_evaluated_steps(tmp_path, finished):
    rows = toy_trainer(toy_config(tmp_path, "log.every=5")).run()
    assert [row["step"] for row in rows] == [5, 6, 10, 12]
    by_step = {row["step"]: row for row in finished[1]}
    assert _untimed(rows) == _untimed([by_step[row["step"]] for row in rows])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "model.moe.num_experts=8",
            [
                "model.moe.num_experts: 4 -> 8",
                "params/groups_0/experts (saved (2, 4, 16, 8), wanted (2, 8, 16, 8))",
                "run.name",
            ],
        ),
        ("model.attention.rope_theta=5", ["model.attention.rope_theta: 10000.0 -> 5.0", "none in shape"]),
        (
            "optimizer.name=muon",
            ["opt_state/moments/muon/mu/groups_0/experts (saved nothing, wanted (2, 4, 16, 8))", "run.name"],
        ),
        ("run.seed=3", ["run.seed (0 -> 3)"]),
        ("data.corpus=other", ["data.corpus", "run.name"]),
        ("data.batch_size=16", ["data.batch_size (8 -> 16)"]),
        ("checkpoint.resume=false", ["checkpoint.resume=false", "run.name"]),
    ],
)
def test_folder_of_another_run_is_refused(finished, override, words):
    folder, _ = finished
    with pytest.raises(UserError) as refusal:
        toy_trainer(toy_config(folder.parent, "train.steps=20", override)).run()
    for word in words:
        assert word in str(refusal.value)
    assert load_config(folder) == toy_config(folder.parent)


def test_file_in_the_way_of_the_folder(tmp_path):
    (tmp_path / "toy").write_text("")
    with pytest.raises(UserError, match="set run.root"):
        toy_trainer(toy_config(tmp_path)).run()


def test_metrics_are_read_after_the_next_interval_was_dispatched(tmp_path):
    """Reading must not stall the devices: step s is read only once step s + log.every is on its way."""
    dispatched, read = [], []

    def train_step(step, inner, state, batch):
        dispatched.append(step)
        state, metrics = inner(state, batch)
        return state, {**metrics, "probe": _Probe(step, dispatched, read)}

    config = toy_config(tmp_path, "log.every=2", "eval.every=100", "checkpoint.every=100")
    toy_trainer(config, program=lambda config, poison: _Wrapped(toy_program(config, poison), train_step)).run()
    assert read == [(2, 4), (4, 6), (6, 8), (8, 10), (10, 12), (12, 12)]


class _Probe:
    """A metric that notes when it is read: which step it is of, and how many steps were dispatched."""

    def __init__(self, step, dispatched, read):
        self.step, self.dispatched, self.read = step, dispatched, read

    def __array__(self, dtype=None, copy=None):
        self.read.append((self.step, len(self.dispatched)))
        return np.float32(0).reshape(())


def test_state_lives_on_the_mesh_of_the_configuration(tmp_path):
    program = toy_program(toy_config(tmp_path))
    state = program.init(0)
    experts = state.opt_state["moments"].mu["groups_0"]["experts"]
    assert experts.sharding.spec == program.abstract_state.params["groups_0"]["experts"].sharding.spec
    assert jnp.size(experts.addressable_shards[0].data) == experts.size // 8
