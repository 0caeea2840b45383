"""Two runs side by side: what each needed to reach the same loss, in tokens, FLOPs and device time."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moejax.config import Config
from moejax.configure import load_config
from moejax.errors import UserError
from moejax.plan.flops import training_flops
from moejax.plan.tensors import tensors


@dataclass(frozen=True)
class Curve:
    """The loss of a run.

    Attributes:
        name: Folder of the run.
        devices: Number of devices.
        loss: Smoothed cross-entropy of the next token at each logged step, without the balance, router and multi-token
            terms that differ between runs (metrics without `ce_loss`: the training loss); its running minimum.
        tokens: Tokens so far.
        flops: Useful FLOPs so far.
        seconds: Training time so far.
    """

    name: str
    devices: int
    loss: np.ndarray
    tokens: np.ndarray
    flops: np.ndarray
    seconds: np.ndarray

    def at(self, loss: float) -> dict[str, float]:
        """Tokens, FLOPs, seconds and device-hours when the loss first was `loss`; NaN if it never was."""
        place = _first(self.loss, loss)
        found = {name: _pick(getattr(self, name), place) for name in ("tokens", "flops", "seconds")}
        return found | {"device_hours": found["seconds"] * self.devices / 3600}


def read_curve(folder: str, smooth: int = 1) -> Curve:
    """The curve of a run folder.

    Args:
        folder: ROOT/NAME of the run.
        smooth: Logged steps to average over.

    Raises:
        UserError: The folder holds no run with logged losses, or there is nothing to average over.
    """
    if smooth < 1:
        raise UserError(f"--smooth={smooth}: must be at least 1 logged step")
    path = Path(folder, "metrics.jsonl")
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError:
        raise UserError(f"{path}: cannot be read; give the folder of a run") from None
    except ValueError:
        raise UserError(f"{path}: not one JSON object a line; give the folder of a run") from None
    rows = [row for row in rows if "loss" in row and row.get("tokens_per_second")]
    if len(rows) < 2:
        raise UserError(f"{path}: fewer than two logged losses; train longer, or set log.every lower")
    config = load_config(folder)
    return _curve(folder, config, rows, smooth)


def _curve(name: str, config: Config, rows: Sequence[dict[str, Any]], smooth: int) -> Curve:
    of_loss = "ce_loss" if all("ce_loss" in row for row in rows) else "loss"
    loss, tokens, speed = (
        np.array([row[key] for row in rows], float) for key in (of_loss, "tokens", "tokens_per_second")
    )
    width = max(1, min(smooth, len(loss)))
    kernel = np.convolve(loss, np.ones(width), "full")[: len(loss)] / np.minimum(np.arange(len(loss)) + 1, width)
    seconds = np.cumsum(np.diff(tokens, prepend=0.0) / speed)
    flops = tokens * sum(training_flops(config, tensors(config)).values())
    return Curve(name, config.mesh.size, np.minimum.accumulate(kernel), tokens, flops, seconds)


def _first(loss: np.ndarray, level: float) -> float:
    """Place between logged steps where a falling curve first is `level`; NaN if it never is."""
    below = np.flatnonzero(loss <= level)
    if not below.size:
        return float("nan")
    index = int(below[0])
    if index == 0:
        return 0.0
    high, low = loss[index - 1], loss[index]
    return index - 1 + float((high - level) / (high - low))


def _pick(values: np.ndarray, place: float) -> float:
    return float("nan") if np.isnan(place) else float(np.interp(place, np.arange(len(values)), values))


def compare(a: Curve, b: Curve, loss: float | None = None) -> dict[str, Any]:
    """What both needed for the same loss, and ratios of A to B.

    rho_H = H_A / H_B = (F_A / F_B) x (R_B / R_A): device-hours, FLOPs, and FLOPs per device and second
    (report, equation 4).

    Args:
        a: First run.
        b: Second run.
        loss: Loss to reach; by default the lowest that both reached.
    """
    level = max(a.loss[-1], b.loss[-1]) if loss is None else loss
    found = {"loss": float(level), "a": a.at(level), "b": b.at(level)}
    ratios = {name: found["a"][name] / found["b"][name] for name in ("tokens", "flops", "seconds")}
    rates = [curve.at(level)["flops"] / (curve.at(level)["device_hours"] * 3600) for curve in (a, b)]
    found["ratios"] = ratios | {"flops_per_device_second": rates[0] / rates[1]}
    found["rho_H"] = found["a"]["device_hours"] / found["b"]["device_hours"]
    return found
