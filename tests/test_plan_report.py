"""The plan of a run: memory, FLOPs, estimates, and the page."""

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import pytest
import tiny

from moejax.cli.main import main
from moejax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    LayerGroup,
    LayerSpec,
    MeshConfig,
    ModelConfig,
    MoEModelConfig,
    OptimizerConfig,
    RematConfig,
    TrainConfig,
    WeightsConfig,
)
from moejax.configure import load_config
from moejax.errors import UserError
from moejax.plan.activations import saved_bytes
from moejax.plan.compile import compile_step
from moejax.plan.cost import step_cost
from moejax.plan.flops import causal_pairs, forward_flops, mfu, training_flops
from moejax.plan.memory import bytes_per_parameter, memory, state_memory
from moejax.plan.page import make_page
from moejax.plan.parameters import module_counts
from moejax.plan.report import make_report, with_devices
from moejax.plan.search import HEADROOM, changed, evaluate, improvements, search
from moejax.plan.target import read_target
from moejax.plan.tensors import tensors


def figure_4(experts: int, **sections) -> Config:
    """The report's model of figure 4: one dense layer and seven with experts, width 4,096, four of N and one shared."""
    model = ModelConfig(
        vocab_size=100_352,
        d_model=4096,
        mlp_dim=5 * 4096,
        layers=(LayerGroup(1, (LayerSpec("dense"),)), LayerGroup(7)),
        attention=AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128),
        moe=MoEModelConfig(num_experts=experts, top_k=4, expert_dim=4096, shared_dim=4096),
    )
    return Config(model=model, data=DataConfig(sequence_length=8192, batch_size=8), **sections)


@pytest.mark.parametrize(("experts", "total"), [(8, 4.58), (32, 13.04), (48, 18.67), (64, 24.31), (128, 46.86)])
def test_figure_4_counts_and_flops(experts: int, total: float) -> None:
    run = figure_4(experts)
    counts = module_counts(run)
    assert round(counts.total / 1e9, 2) == total
    assert round(counts.active / 1e9, 2) == 3.17
    assert sum(training_flops(run, tensors(run)).values()) == pytest.approx(18.2e9, rel=0.005)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 20])
def test_causal_pairs_are_counted_exactly(window: int | None) -> None:
    mask = [(q, k) for q in range(11) for k in range(11) if k <= q and (window is None or q - k < window)]
    assert causal_pairs(11, window) == len(mask)


def test_flops_of_a_token_by_hand() -> None:
    run = tiny.config()
    parts = forward_flops(run, tensors(run))
    d, attention = 32, 32 * (4 + 2 + 2) * 8 + 4 * 8 * 32
    assert parts["attention"] == 2 * 3 * attention
    assert parts["dense FFN"] == 2 * 3 * d * 40
    assert parts["routed experts"] == 2 * 2 * (2 * 3 * d * 24)  # two layers, two experts of a token
    assert parts["shared experts"] == 2 * 2 * 3 * d * 16
    assert parts["routers"] == 2 * 2 * d * 8
    assert parts["head"] == 2 * d * 264
    pairs = causal_pairs(16, 5) + 2 * causal_pairs(16, None)
    assert parts["attention scores"] == 4 * 4 * 8 * pairs / 16
    assert "embedding" not in parts
    tied = tiny.config(model=dataclasses.replace(tiny.MODEL, tie_embeddings=True))
    assert forward_flops(tied, tensors(tied))["head"] == parts["head"]
    assert mfu(18e9, 1000.0, 8, 2.25e15) == pytest.approx(1e-3)


@pytest.mark.parametrize(("expert", "want"), [(1, 1), (4, 4)])
def test_bytes_per_parameter_are_the_reports(expert: int, want: int) -> None:
    run = dataclasses.replace(figure_4(32), mesh=MeshConfig(data=8 // expert, expert=expert), train=TrainConfig(10, 1))
    found = tensors(run)
    accumulated = {tensor.name: 4 * tensor.compute_size + tensor.compute_bytes for tensor in found}
    for tensor in found:
        if not any(tensor.layout.extra):
            continue
        whole = accumulated[tensor.name] + tensor.main_bytes + tensor.optimizer_bytes
        ranks = want if tensor.part == "routed experts" else 1
        routers = 2 if tensor.part == "routers" else 0  # float32 compute weights
        assert whole / tensor.size == pytest.approx(bytes_per_parameter(8, ranks) + routers)
    assert bytes_per_parameter(8, distributed=False) == 18
    assert bytes_per_parameter(64) == 6 + 12 / 64
    assert bytes_per_parameter(64, 8) == 6 / 8 + 12 / 64


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_storage_is_what_the_program_holds(optimizer) -> None:
    run = tiny.config(2, 4, optimizer=OptimizerConfig(optimizer))
    program = tiny.program(run)

    def held(tree) -> int:
        shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(tree)]
        sizes = [leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)]
        return sum(math.prod(shard) * size for shard, size in zip(shards, sizes, strict=True))

    memory = state_memory(run, tensors(run))
    state = program.abstract_state
    assert memory["main weights"] == held(state.params)
    assert 0 <= held(state.opt_state) - memory["optimizer state"] < 1000  # counts, and Muon's constants


def test_gather_modes_trade_memory_and_accumulation_adds_to_it() -> None:
    sizes = {
        mode: state_memory(tiny.config(2, 4, turns, weights=WeightsConfig(mode)), tensors(tiny.config(2, 4)))  # type: ignore[arg-type]
        for mode, turns in (("step", 4), ("microbatch", 4), ("layer", 4))
    }
    whole = {mode: sum(memory.values()) for mode, memory in sizes.items()}
    assert whole["step"] > whole["microbatch"] > whole["layer"]
    assert state_memory(tiny.config(2, 4), tensors(tiny.config(2, 4)))["gradient accumulators"] == 0


@pytest.fixture(scope="module")
def report() -> dict:
    return make_report(tiny.config(2, 4, 2), read_target("h200x8"))


def test_report_is_complete_and_adds_up(report: dict) -> None:
    json.dumps(report)
    cost = report["cost"]
    assert cost["step_seconds"] == pytest.approx(cost["model_seconds"] + sum(cost["tax_seconds"].values()))
    assert cost["mfu"] == pytest.approx(
        mfu(report["flops"]["per_token"], cost["tokens_per_second"], report["devices"], cost["peak"])
    )
    assert {move["link"] for move in report["traffic"]} == {"inside a node"}
    assert report["fit"]["fits"]
    assert len(report["improvements"]) <= 3
    assert all(item["speedup"] > 1 and item["fits"] for item in report["improvements"])


def test_page_needs_no_network_and_names_every_class(report: dict) -> None:
    page = make_page(report)
    assert len(re.findall("<svg", page)) == 5
    assert not re.search(r"(src|href)=|@import|url\(", page)
    for name in [*report["memory"], *report["cost"]["tax_seconds"], *report["parameters"]["parts"]]:
        assert f">{name}<" in page


def test_more_accumulation_makes_a_token_cheaper_with_step_but_hardly_with_layer() -> None:
    target, speed = read_target("b300x8"), {}
    for mode in ("step", "layer"):
        for turns in (1, 16):
            base = figure_4(48, mesh=MeshConfig(data=8), weights=WeightsConfig(mode))
            run = changed(base, {"train.microbatches": turns, "data.batch_size": 8 * turns})
            assert run is not None
            speed[mode, turns] = step_cost(run, tensors(run), target).tokens_per_second
    assert speed["step", 16] / speed["step", 1] > 1.2
    assert speed["layer", 16] / speed["layer", 1] < 1.2
    assert speed["step", 16] > speed["layer", 16]


def test_a_run_that_does_not_fit_names_the_class_and_how_much_is_missing() -> None:
    tiny_memory = dataclasses.replace(read_target("h200x8"), memory=200_000)
    found = evaluate(tiny.config(2, 4, 2), tiny_memory)
    assert not found.fits
    want = r"does not fit: \S+ \wiB of 179.69 KiB per device, \S+ \wiB over; the largest class is [\w ]+ with \S+ \wiB"
    assert re.fullmatch(want, found.verdict())
    assert found.peak - found.limit > 0
    run, target = tiny.config(2, 4, 2, remat=RematConfig("none")), read_target("h200x8")
    full = changed(run, {"remat.policy": "full"})
    assert full is not None
    between = (evaluate(run, target).peak + evaluate(full, target).peak) / 2 / HEADROOM
    found = improvements(run, dataclasses.replace(target, memory=between))
    assert ("--remat.policy=full",) in [item.change for item in found]  # slower, but it fits
    assert all(item.fits for item in found)


@pytest.mark.slow
def test_search_ranks_layouts_of_the_same_batch() -> None:
    run, target = tiny.config(4, 1, 2), read_target("h200x8")
    found = search(run, target)
    assert [item.cost.step for item in found] == sorted(item.cost.step for item in found)
    assert {item.config.mesh.expert for item in found} == {1, 2, 4}
    assert {item.config.weights.gather for item in found} == {"step", "microbatch", "layer"}
    assert {item.config.data.batch_size for item in found} == {32}
    assert all(item.config.mesh.size == 4 for item in found)
    assert improvements(run, target)


def test_chips_change_replicas_and_keep_the_work_of_each() -> None:
    run = with_devices(tiny.config(2, 4), 64)
    assert (run.mesh.data, run.mesh.expert, run.data.batch_size) == (16, 4, 256)
    with pytest.raises(UserError, match="positive multiple of 4"):
        with_devices(tiny.config(2, 4), 6)


def test_command_writes_json_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "small.yaml"
    config.write_text("run: {name: small}\nmodel: {dtype: float32}\ndata: {batch_size: 8, sequence_length: 32}\n")
    line = ["plan", str(config), "--target", "v5e", "--chips", "8", "--mesh.expert=4", "--out", str(tmp_path / "out")]
    assert main(line) == 0
    out = capsys.readouterr().out
    assert "tax: routing" in out
    assert "largest microbatch that fits" in out
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["mesh"]["data"] == 2
    assert "<svg" in (tmp_path / "out" / "plan.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compile"], "--compile: needs a machine"),
        (["--target", "h100"], "did you mean 'h100x8'"),
        (["--target", "v5p", "--chips", "7", "--mesh.expert=2"], "--chips=7: must be a positive multiple of 2"),
    ],
)
def test_bad_arguments_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments, message: str
) -> None:
    config = tmp_path / "small.yaml"
    config.write_text("run: {name: small}\n")
    assert main(["plan", str(config), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_saved_activations_hold_no_weights() -> None:
    """Twice the experts of the same tokens: as many rows, and scores of twice the width, but no weight in any shape."""
    model = tiny.MODEL
    more = dataclasses.replace(model, moe=dataclasses.replace(model.moe, num_experts=2 * model.moe.num_experts))
    few, many = saved_bytes(tiny.config(model=model)), saved_bytes(tiny.config(model=more))
    per_token = 4 * 16 * model.moe.num_experts * 2  # at most a few float32 arrays [T, N] in each of two layers
    assert 0 <= many - few < 8 * per_token < 4 * 8 * model.moe.expert_dim * model.d_model


@pytest.mark.slow
def test_memory_estimate_of_the_quickstart() -> None:
    run = load_config(Path(__file__).parents[1] / "configs" / "quickstart.yaml")
    estimate = sum(memory(run, tensors(run), "cpu").values())
    assert estimate == pytest.approx(compile_step(run, read_target("cpu")).peak, rel=0.15)
