"""Trains the quickstart model in bfloat16, in MXFP8 with both scale modes, and in float32, and compares the losses.

    python benchmarks/mxfp8_training.py [--steps 200] [--seeds 0 ...] [--only NAME ... --] [dotted.key=value ...]

The runs see the same batches from the same initial weights, one after the other, on 8 simulated devices of this
machine. Printed: mean training loss and gradient norm of the last 20 steps, loss on held-out text, and their
difference from the first variant with the same seed. Bound: 0.5% for MXFP8, in both losses, on average over seeds:
one run moves by as much either way. float32 is the control: what another arithmetic changes by itself, because the
path of a short run is chaotic. The learning rate is a quarter of the
quickstart's, at which runs part by more than the bound.
"""

import argparse
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import numpy as np

from moejax.config import Config
from moejax.configure import load_config
from moejax.data.loader import Loader
from moejax.train.evaluate import HeldOut
from moejax.train.program import Program

LAST = 20
BOUND = 0.005
COMMON = ("optimizer.learning_rate=1e-3",)
VARIANTS = {
    "bfloat16": ("model.dtype=bfloat16",),
    "mxfp8": ("model.dtype=bfloat16", "weights.compute=mxfp8"),
    "floor": ("model.dtype=bfloat16", "weights.compute=mxfp8", "weights.scale=floor"),
    "float32": ("model.dtype=float32",),
}


def train(config: Config, steps: int) -> dict[str, float]:
    """Figures of one run."""
    program = Program(config)
    state, losses, norms = program.init(config.run.seed), [], []
    batches = Loader(config, "train", quiet=True).batches(0, rows=program.rows)
    for _ in range(steps):
        state, metrics = program.train_step(state, program.put(next(batches)))
        losses.append(float(metrics["ce_loss"]))
        norms.append(float(metrics["grad_norm"]))
    assert int(state.skipped) == 0, "steps were skipped"
    held_out = HeldOut(config, Loader(config, "heldout", quiet=True)).evaluate(program, state.params)
    found = {"training loss": np.mean(losses[-LAST:]), "held-out loss": held_out["eval/loss"]}
    found |= {"gradient norm": np.mean(norms[-LAST:]), "gradient norm, all steps": np.mean(norms)}
    return {key: float(value) for key, value in found.items()}


def main() -> None:
    """Run all variants and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    differences: dict[str, list[dict[str, float]]] = {name: [] for name in args.only}
    for seed in args.seeds:
        base: dict[str, float] = {}
        for name in args.only:
            overrides = [f"train.steps={args.steps}", f"run.seed={seed}", *COMMON, *args.overrides, *VARIANTS[name]]
            found = train(load_config(args.config, overrides), args.steps)
            base = base or found
            differences[name].append({key: value / base[key] - 1 for key, value in found.items()})
            figures = (f"{key} {value:.4f} ({value / base[key] - 1:+.2%})" for key, value in found.items())
            print(f"seed {seed}, {name}: {'; '.join(figures)}", flush=True)
    for name, runs in differences.items():
        mean = {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
        print(f"mean over {len(runs)} seeds, {name}: {'; '.join(f'{key} {value:+.2%}' for key, value in mean.items())}")
        if name == "mxfp8":
            worst = max(abs(mean[key]) for key in ("training loss", "held-out loss"))
            print(f"largest difference of a loss {worst:.2%}: {'holds' if worst < BOUND else 'BROKEN'} ({BOUND:.1%})")


if __name__ == "__main__":
    main()
