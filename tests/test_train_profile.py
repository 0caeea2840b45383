"""Figures on every row, and traces: from a real tiny run, through the command line's own objects."""

import gzip
import json
import math

import numpy as np
import pytest
from train_toy import toy_config, toy_trainer

from moejax import Meter, Trainer, load_config
from moejax.cli.main import main
from moejax.errors import UserError
from moejax.plan.trace import CAPACITY, MODEL, OTHER, RUNTIME, SCOPES, instructions, read_trace, scope_of
from moejax.train.measure import PARTS

TINY = """
mesh: {data: 2, expert: 2}
model:
  vocab_size: 257
  d_model: 16
  mlp_dim: 16
  layers: [{repeat: 2}]
  attention: {num_heads: 2, num_kv_heads: 1, head_dim: 8}
  moe: {num_experts: 4, top_k: 2, expert_dim: 16}
  dtype: float32
sharding: {replicate_below: 100}
data: {sequence_length: 16, batch_size: 8, heldout_fraction: 0.2}
train: {steps: 6}
eval: {every: 6, batches: 1}
log: {every: 2}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose steps 3 to 5 were traced: its folder, its rows, and what it printed."""
    root = tmp_path_factory.mktemp("profiled")
    (root / "tiny.yaml").write_text(TINY)
    (root / "corpus.jsonl").write_text("\n".join(json.dumps({"text": f"{i} {i * i} {i**3}"}) for i in range(300)))
    options = [f"data.corpus={root / 'corpus.jsonl'}", f"run.root={root}", "run.name=tiny"]
    config = load_config(root / "tiny.yaml", options)
    lines: list[str] = []

    class Loud(Meter):
        def compiled(self, text):
            lines.extend(super().compiled(text))
            return []

    rows = Trainer(config, make_meter=Loud, profile="3:5").run()
    return config, root / "tiny", rows, lines


def model_flops_by_hand() -> int:
    """Of one step of 8 x 16 tokens: attention, router, experts and head, and the pairs that the mask leaves."""
    attention = 16 * (2 + 1 + 1) * 8 + 2 * 8 * 16
    layer = attention + 16 * 4 + 2 * 3 * 16 * 16
    scores = 2 * (2 * 2 * 8) * (16 * 17 // 2) / 16
    return round(3 * (2 * (2 * layer + 16 * 257) + 2 * scores) * 8 * 16)


def test_rows_hold_flops_bytes_and_the_time_of_the_host(run):
    _, _, rows, lines = run
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert "no peak is known for the device 'cpu'" in lines[0]
    for row in rows:
        assert "mfu" not in row
        speed = row["model_flops_per_second"] * 4 / row["tokens_per_second"]
        assert math.isclose(speed * 8 * 16, model_flops_by_hand(), rel_tol=1e-9)
        assert math.isclose(row["model_flops"], speed * row["tokens_per_second"] * row["step_seconds"], rel_tol=1e-9)
        for name in ("weight_gather", "gradient_reduce", "dispatch", "combine", "plan"):
            assert row[f"bytes_expected/{name}"] == row[f"bytes_compiled/{name}"] > 0
        host = [row[f"host_seconds/{part}"] for part in PARTS]
        assert min(host) >= 0
        assert row["host_seconds/dispatch"] > 0
    assert rows[1]["host_seconds/pause"] > rows[0]["host_seconds/pause"]  # the trace starts before step 3


def test_mfu_where_the_device_is_known(run):
    config, _, _, _ = run
    row = {"tokens_per_second": 1e6, "step_seconds": 0.5}
    found = Meter(config, "NVIDIA H200").figures(row)
    flops = model_flops_by_hand() / (8 * 16)
    assert math.isclose(found["mfu"], flops * 1e6 / (4 * 989.5e12), rel_tol=1e-9)
    assert Meter(config, "TPU v5p").figures(row)["mfu"] > found["mfu"]
    assert "mfu" not in Meter(config, "some new chip").figures(row)


def test_bytes_that_cannot_be_counted_end_no_run(run):
    lines = Meter(run[0]).compiled("HloModule nothing")
    assert "not counted" in lines[-1]


def test_the_trace_holds_every_scope_and_adds_up(run, capsys):
    _, folder, _, _ = run
    trace = read_trace(str(folder))
    assert trace == read_trace(str(folder / "profile"))
    assert (trace.first, trace.last, trace.devices) == (3, 5, 4)
    wanted = {"embed", "attention", "experts", "head", "gather", "reduce", "update", "route", "plan", "dispatch"}
    assert wanted | {"combine"} <= trace.busy.keys() <= SCOPES.keys() | {OTHER}
    assert min(trace.busy.values()) > 0
    assert trace.moving["gather"] > 0
    assert trace.moving["attention"] == trace.backward["update"] == 0
    assert trace.backward["attention"] > 0
    kinds = trace.kinds()
    assert math.isclose(sum(kinds.values()), sum(trace.busy.values()))
    assert kinds[CAPACITY] == trace.busy["gather"] + trace.busy["reduce"] + trace.busy["update"]
    assert main(["inspect", "trace", str(folder)]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("steps 3 to 5 on 4 x cpu", "dispatch", MODEL, CAPACITY, RUNTIME))
    assert main(["inspect", "trace", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kinds"] == kinds


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")  # of JAX's reader, on Python 3.12
def test_each_instruction_is_summed_over_devices_and_steps(run):
    """By hand from the events, for the instructions of one scope."""
    from jax.profiler import ProfileData

    _, folder, _, _ = run
    trace = read_trace(str(folder))
    text = gzip.decompress((folder / "profile" / "step.hlo.txt.gz").read_bytes()).decode()
    names = {name for name, (_, op_name) in instructions(text).items() if "/update/" in op_name}
    (file,) = (folder / "profile").rglob("*.xplane.pb")
    events = [e for plane in ProfileData.from_file(str(file)).planes for line in plane.lines for e in line.events]
    durations = [e.duration_ns for e in events if dict(e.stats).get("hlo_op") in names]
    assert len(durations) % (3 * 4) == 0
    np.testing.assert_allclose(trace.busy["update"], sum(durations) / 1e9 / (3 * 4), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("jit(_step)/shard_map/while/body/jvp()/ffn/experts/grouped_matmul/while/body/dot_general", "experts"),
        ("jit(_step)/shard_map/transpose(jvp(ffn))/dispatch/all_to_all", "dispatch"),
        ("jit(_step)/shard_map/jvp()/ffn/plan/gather", "plan"),
        ("jit(_step)/shard_map/gather/all_gather", "gather"),
        ("jit(_step)/shard_map/while/body/add", OTHER),
        ("gather", OTHER),
        ("", OTHER),
    ],
)
def test_scope_of_an_operation(name, scope):
    assert scope_of(name) == scope


def test_loops_and_calls_are_no_time_of_their_own():
    text = """
  %w.1 = (s32[], f32[8]{0}) while(%t), condition=%c, body=%b, metadata={op_name="jit(s)/update/while"}
  ROOT %f.2 = f32[8]{0} fusion(%w.1), kind=kLoop, calls=%x, metadata={op_name="jit(s)/update/mul"}
  call.3 = f32[] call(%y), to_apply=%z
  %g = (f32[2]{0}, f32[8]{0}) all-gather-start(%y), dimensions={0}
"""
    assert instructions(text) == {"f.2": ("fusion", "jit(s)/update/mul"), "g": ("all-gather-start", "")}


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("5", "must be START:STOP"),
        ("a:b", "must be START:STOP"),
        ("0:3", "counted from 1"),
        ("4:3", "must not be after STOP"),
        ("4:13", "the run ends with step 12"),
    ],
)
def test_bad_ranges_are_refused_before_anything_runs(tmp_path, profile, message):
    with pytest.raises(UserError, match=message):
        Trainer(toy_config(tmp_path), profile=profile)


def test_a_range_that_is_over_is_refused(tmp_path):
    toy_trainer(toy_config(tmp_path)).run()
    with pytest.raises(UserError, match="12 steps of the run are done"):
        toy_trainer(toy_config(tmp_path, "train.steps=20"), profile="12:14").run()


def test_folders_without_a_trace(tmp_path, run, capsys):
    assert main(["inspect", "trace", str(tmp_path)]) == 2
    assert "no trace in there" in capsys.readouterr().err
    (file,) = (run[1] / "profile").rglob("*.xplane.pb")
    (tmp_path / "alone.xplane.pb").write_bytes(file.read_bytes())
    assert main(["inspect", "trace", str(tmp_path)]) == 2
    assert "steps.json beside the trace" in capsys.readouterr().err
