"""Work of pipelined steps against one device: CPU seconds of a step, which no waiting and no other process changes.

    python benchmarks/pipeline.py [--steps 3] [--layers 8] [--microbatches 8]

Simulated devices share the cores, so CPU time measures work, not parallelism: a stage that computes what is thrown away
shows as a ratio above 1. The last column is what the same step would take on real stages, in units of perfect division.
"""

import argparse
import resource
import time

import jax
import numpy as np

from moejax.config import (
    Config,
    DataConfig,
    LayerGroup,
    LayerSpec,
    MeshConfig,
    ModelConfig,
    MoEModelConfig,
    PipelineConfig,
    RematConfig,
    TrainConfig,
)
from moejax.schedule.table import make_table
from moejax.sharding import make_mesh
from moejax.train.program import Program


def cpu_seconds() -> float:
    """CPU time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def step_seconds(run: Config, steps: int) -> tuple[float, float]:
    """Median CPU and wall seconds of a step."""
    program = Program(run, make_mesh(run.mesh, jax.devices()[: run.mesh.size]))
    state, rng = program.init(0), np.random.default_rng(0)
    shape = (run.data.batch_size, run.data.sequence_length)
    tokens = rng.integers(0, run.model.vocab_size, shape).astype(np.int32)
    places = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    arrays = {"tokens": tokens, "targets": tokens, "segments": np.ones(shape, np.int32), "positions": places}
    batch, cpu, wall = program.put(arrays), [], []
    for _ in range(steps + 1):
        before, started = cpu_seconds(), time.monotonic()
        state, metrics = program.train_step(state, batch)
        jax.block_until_ready((state, metrics))
        cpu.append(cpu_seconds() - before)
        wall.append(time.monotonic() - started)
    return float(np.median(cpu[1:])), float(np.median(wall[1:]))


def main() -> None:
    """Print a line for each mesh and schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8, help="MoE layers; a dense one comes before them")
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)
    model = ModelConfig(
        vocab_size=512,
        d_model=256,
        mlp_dim=1024,
        layers=(LayerGroup(1, (LayerSpec("dense"),)), LayerGroup(args.layers)),
        moe=MoEModelConfig(num_experts=8, top_k=2, expert_dim=512),
        dtype="float32",
    )

    def run(stage: int, schedule: str = "1f1b", virtual: int = 1) -> Config:
        return Config(
            mesh=MeshConfig(stage=stage),
            model=model,
            pipeline=PipelineConfig(schedule, virtual),  # type: ignore[arg-type]
            remat=RematConfig("full"),
            data=DataConfig(batch_size=2 * args.microbatches, sequence_length=256),
            train=TrainConfig(microbatches=args.microbatches),
        )

    alone, _ = step_seconds(run(1), args.steps)
    print(f"{'stages':>6} {'virtual':>7} {'schedule':>8} {'CPU s':>7} {'of one device':>13} {'lock step':>9}")
    print(f"{1:6} {1:7} {'':8} {alone:7.2f} {1:13.2f} {1:9.2f}", flush=True)
    for stage, virtual, schedule in ((2, 1, "1f1b"), (4, 1, "1f1b"), (4, 2, "1f1b"), (4, 1, "gpipe")):
        seconds, _ = step_seconds(run(stage, schedule, virtual), args.steps)
        idle = make_table(stage, args.microbatches, virtual, schedule).idle_share()  # type: ignore[arg-type]
        print(
            f"{stage:6} {virtual:7} {schedule:>8} {seconds:7.2f} {seconds / alone:13.2f} {1 / (1 - idle):9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
