"""Pipelined gradients against those of one device. Run as a program it does the whole product on 16 devices."""

import dataclasses
import itertools
import os
import sys
import time
from functools import cache
from typing import Any

import jax
import numpy as np
import tiny

from moejax.config import (
    Config,
    ContextConfig,
    DataConfig,
    LayerGroup,
    LayerSpec,
    LossConfig,
    MeshConfig,
    ModelConfig,
    PipelineConfig,
    RematConfig,
    TrainConfig,
)

STAGES, MICROBATCHES, VIRTUAL, EXPERT = (2, 4, 8), (1, 3, 4, 8), (1, 2), (1, 2)
SCHEDULES = ("1f1b", "gpipe")


def model(layers: int) -> ModelConfig:
    """A dense layer, then MoE layers."""
    groups = (LayerGroup(1, (LayerSpec("dense", window=5),)), LayerGroup(layers - 1))
    return dataclasses.replace(tiny.MODEL, layers=groups)


def config(layers: int, microbatches: int = 1, scope: str = "sequence") -> Config:
    """A run of 48 sequences, with balance losses large enough to be seen in gradients."""
    return dataclasses.replace(
        tiny.config(),
        model=model(layers),
        loss=LossConfig(balance_weight=0.3, balance_scope=scope, z_weight=0.1),  # type: ignore[arg-type]
        data=DataConfig(batch_size=48, sequence_length=16),
        train=TrainConfig(steps=20, microbatches=microbatches),
    )


def gradients(run: Config) -> tuple[Any, dict[str, Any], Any]:
    """Gradients, metrics, and dims of the parameters."""
    program = tiny.program(run)
    state = program.init(0)
    grads, metrics = jax.device_get(jax.jit(program.gradients)(state.params, program.put(tiny.batch(run))))
    return grads, metrics, program.decoder.dims


@cache
def reference(layers: int, scope: str = "sequence", microbatches: int = 1) -> tuple[Any, dict[str, Any]]:
    """Of one device."""
    return gradients(config(layers, microbatches, scope))[:2]


@dataclasses.dataclass(frozen=True)
class Case:
    """A pipelined run."""

    microbatches: int
    stage: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    layers: int = 4
    scope: str = "sequence"
    remat: str = "none"
    context: str = "ulysses"
    cuts: tuple[int, ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()

    @property
    def config(self) -> Config:
        """The run."""
        return dataclasses.replace(
            config(self.layers, self.microbatches, self.scope),
            mesh=MeshConfig(stage=self.stage, **dict(self.mesh)),
            pipeline=PipelineConfig(self.schedule, self.virtual, self.cuts),  # type: ignore[arg-type]
            remat=RematConfig(self.remat),  # type: ignore[arg-type]
            context=ContextConfig(self.context),  # type: ignore[arg-type]
        )


def worst(case: Case) -> dict[str, float]:
    """Largest deviation from one device: of the loss parts, of routed counts, and of gradients, each leaf, layer and
    expert apart, relative to the largest entry there."""
    alone = case.scope in ("sequence", "sequence_unbiased")
    want, wanted = reference(case.layers, case.scope, 1 if alone else case.microbatches)
    got, found, dims = gradients(case.config)
    keys = ("loss", "ce_loss", "balance_loss", "z_loss", "grad_norm", "moe/margin", "moe/entropy_imbalance")
    parts = [abs(float(found[key]) / float(wanted[key]) - 1) for key in keys]
    error = 0.0
    paths = jax.tree_util.tree_leaves_with_path(dims, is_leaf=lambda x: isinstance(x, tuple))
    for (_, names), g, w in zip(paths, jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        for part in np.ndindex(w.shape[: sum(name in ("layers", "experts") for name in names)]):
            scale = max(np.abs(w[part]).max(), np.abs(w).max() * 1e-3)
            error = float(np.maximum(error, np.max(np.abs(g[part] - w[part])) / scale))
    counts = float(np.abs(found["moe/requested"] - wanted["moe/requested"]).max())
    return {"losses": float(np.max(parts)), "counts": counts, "gradients": error}


def main() -> None:
    """The product of stages, microbatches, virtual stages, expert ranks and schedules; or a share, `i/n`."""
    import conftest

    jax.config.update("jax_num_cpu_devices", max(STAGES) * max(EXPERT))
    assert " ".join(conftest.FAST_COMPILE) in os.environ["XLA_FLAGS"]
    share, shares = map(int, (sys.argv[1] if len(sys.argv) > 1 else "0/1").split("/"))
    product = itertools.product(STAGES, VIRTUAL, EXPERT, MICROBATCHES, SCHEDULES)
    for stage, virtual, expert, microbatches, schedule in list(product)[share::shares]:
        case = Case(microbatches, stage, schedule, virtual, layers=16, mesh=(("expert", expert),))
        started = time.monotonic()
        found = worst(case)
        ok = found["losses"] < 1e-5 and found["counts"] == 0 and found["gradients"] < 1e-5
        line = f"stages {stage} virtual {virtual} expert {expert} microbatches {microbatches} {schedule}"
        print("ok " if ok else "BAD", line, found, f"{time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
