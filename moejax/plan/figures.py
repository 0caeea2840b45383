"""The report's figures 2, 4 and 8a as experiments that anyone can run, on devices at hand or planned for a target."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax.config import Config, MeshConfig, MoEConfig, WeightsConfig
from moejax.files import write_result
from moejax.plan.cost import step_cost
from moejax.plan.flops import tokens_per_step, training_flops
from moejax.plan.roofline import Pair
from moejax.plan.svg import lines
from moejax.plan.target import Target
from moejax.plan.tensors import tensors
from moejax.train.distributed import start
from moejax.train.program import Program

Row = dict[str, Any]

VARIANTS = {
    "step with EP": ("step", True),
    "step": ("step", False),
    "layer with EP": ("layer", True),
    "layer (FSDP)": ("layer", False),
}
"""Variants of figure 4: when weights are gathered, and whether experts are spread over devices."""


@dataclass(frozen=True)
class Measured:
    """One point.

    Attributes:
        tokens_per_second: Of all devices together.
        step_seconds: Median time of a step.
    """

    tokens_per_second: float
    step_seconds: float


def roofline_rows(pair: Pair, balance: float, tokens: Sequence[int]) -> list[Row]:
    """Figure 2: attainable part of peak of a dense FFN and of experts with equal FLOPs."""
    dense = dataclasses.replace(pair, experts=None)
    return [{"tokens": n, "dense": dense.ceiling(n, balance), "moe": pair.ceiling(n, balance)} for n in tokens]


def capacity_runs(base: Config, experts: Sequence[int]) -> Iterator[tuple[str, int, Config]]:
    """Figure 4, one factor at a time: (variant, routed experts, run), and a dense run of equal active size first.

    Args:
        base: A run with routed experts; its devices stay, its mesh is the variant's.
        experts: Numbers of routed experts.
    """
    devices, moe = base.mesh.size, base.model.moe
    groups = tuple(
        dataclasses.replace(group, pattern=tuple(dataclasses.replace(spec, ffn="dense") for spec in group.pattern))
        for group in base.model.layers
    )
    wide = dataclasses.replace(base.model, layers=groups, mlp_dim=moe.top_k * moe.expert_dim + moe.shared_dim)
    alone = dataclasses.replace(base, mesh=MeshConfig(data=devices), moe=MoEConfig())
    yield "dense", 0, dataclasses.replace(alone, model=wide)
    for count in experts:
        model = dataclasses.replace(base.model, moe=dataclasses.replace(moe, num_experts=count))
        for name, (gather, spread) in VARIANTS.items():
            mesh = MeshConfig(expert=devices) if spread else MeshConfig(data=devices)
            exchange = base.moe if spread else dataclasses.replace(base.moe, exchange=None, deduplicate=False)
            weights = WeightsConfig(gather)  # type: ignore[arg-type]
            yield name, count, dataclasses.replace(base, model=model, mesh=mesh, moe=exchange, weights=weights)


def accumulation_runs(base: Config, microbatches: Sequence[int]) -> Iterator[tuple[str, int, Config]]:
    """Figure 8a: (gather, microbatches, run) with the shape of a microbatch fixed, without expert parallelism."""
    devices = base.mesh.size
    rows = base.data.batch_size // (devices * base.train.microbatches)
    moe = dataclasses.replace(base.moe, exchange=None, deduplicate=False)
    for gather in ("step", "layer"):
        for turns in microbatches:
            yield (
                gather,
                turns,
                dataclasses.replace(
                    base,
                    mesh=MeshConfig(data=devices),
                    moe=moe,
                    weights=WeightsConfig(gather),  # type: ignore[arg-type]
                    train=dataclasses.replace(base.train, microbatches=turns),
                    data=dataclasses.replace(base.data, batch_size=rows * devices * turns),
                ),
            )


def plan_run(config: Config, target: Target) -> Measured:
    """The estimate of a step on a target."""
    cost = step_cost(config, tensors(config), target)
    return Measured(cost.tokens_per_second, cost.step)


def measure_runs(configs: Sequence[Config], steps: int) -> Iterator[Measured]:
    """Fastest whole step of each run on this machine's devices; random tokens, learned routes.

    Runs are visited twice in turn, `steps` steps each time: other work only ever adds time, and a slow minute would
    otherwise fall on few of them. What is found comes with the second visit.
    """
    visits = [_visit(config) for config in configs]
    first = [visit(steps) for visit in visits]
    for config, visit, seconds in zip(configs, visits, first, strict=True):
        seconds = min(seconds, visit(steps))
        yield Measured(tokens_per_step(config) / seconds, seconds)


def _visit(config: Config) -> Callable[[int], float]:
    """A function that runs some steps from the start and returns the seconds of the fastest; the first one compiles."""
    program = Program(config, start(config))
    rng = np.random.default_rng(config.run.seed)
    shape = program.batch_shape
    tokens = rng.integers(0, config.model.vocab_size, shape).astype(np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "segments": np.ones(shape, np.int32)}
    rows = {key: np.ascontiguousarray(value)[program.rows] for key, value in (batch | {"positions": positions}).items()}

    def visit(steps: int) -> float:
        state, placed, times = program.init(config.run.seed), program.put(rows), []
        for _ in range(steps + 1):
            started = time.perf_counter()
            state, metrics = program.train_step(state, placed)
            jax.block_until_ready((state, metrics))
            times.append(time.perf_counter() - started)
        return min(times[1:])

    return visit


def row_of(name: str, key: str, value: int, config: Config, found: Measured, peak: float | None) -> Row:
    """A point as a row of CSV; MFU where the peak of a device is known."""
    held = tensors(config)
    flops = sum(training_flops(config, held).values())
    total = sum(tensor.size for tensor in held)
    row = {"variant": name, key: value, "parameters": total, "flops_per_token": flops}
    row |= {"tokens_per_second": found.tokens_per_second, "step_seconds": found.step_seconds}
    return row | {"mfu": flops * found.tokens_per_second / (config.mesh.size * peak) if peak else ""}


def picture(title: str, rows: Sequence[Row], x: str, y: str, path: Path) -> None:
    """Write an SVG with one curve for each variant; rows where x is zero are drawn as level lines."""
    curves: dict[str, list[tuple[float, float]]] = {}
    places = [float(row[x]) for row in rows if row[x]]
    for row in rows:
        points = curves.setdefault(row["variant"], [])
        points += [(float(row[x]), float(row[y]))] if row[x] else [(at, float(row[y])) for at in sorted(set(places))]
    write_result(path, lines(title, curves, x, y.replace("_", " ")))


def retained(rows: Sequence[Row], key: str) -> Mapping[str, float]:
    """Tokens per second at the last value of `key` over those at the first, by variant."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row[key]:
            found.setdefault(row["variant"], []).append(row["tokens_per_second"])
    return {name: speeds[-1] / speeds[0] for name, speeds in found.items()}
