"""What the rows of a run say beyond its metrics: model FLOPs, MFU, expected bytes and those of the compiled step."""

from collections.abc import Sequence
from typing import Any

import jax

from moejax.config import Config
from moejax.plan.flops import mfu, tokens_per_step, training_flops
from moejax.plan.hlo import collectives
from moejax.plan.moves import by_class, compiled_traffic
from moejax.plan.report import mesh_of
from moejax.plan.target import read_target, target_of
from moejax.plan.tensors import tensors
from moejax.plan.text import of_bytes, of_count
from moejax.plan.traffic import step_traffic


class Meter:
    """Figures of a run, for `Trainer(config, make_meter=Meter)`.

    Rows get `model_flops` (of a step, useful ones alone) and `model_flops_per_second` (of one device), `mfu` where
    the device's peak is known (report, equation 95: dense bfloat16 peak), and for each class of traffic the bytes
    that a device sends in a step: `bytes_expected/CLASS` by the formulas of `moejax plan`, `bytes_compiled/CLASS`
    counted in the program that runs.

    Args:
        config: The run.
        device_kind: As JAX names it; by default that of the first device.
    """

    def __init__(self, config: Config, device_kind: str | None = None) -> None:
        device = jax.devices()[0]
        self._kind = device.device_kind if device_kind is None else device_kind
        self._config, self._target, found = config, target_of(self._kind), tensors(config)
        self._flops = sum(training_flops(config, found).values())
        machine = read_target("cpu") if self._target is None and device.platform == "cpu" else self._target
        self._expected = _sent(step_traffic(config, found, machine))
        self._compiled: dict[str, float] = {}

    def compiled(self, text: str) -> Sequence[str]:
        """Count what the compiled step sends; return lines to show."""
        lines = [f"a step: {of_count(self._flops * tokens_per_step(self._config))} model FLOPs"]
        if self._target is None:
            lines[0] += f"; no peak is known for the device '{self._kind}', so MFU is left out"
        try:
            self._compiled = _sent(compiled_traffic(collectives(text), mesh_of(self._config)))
        except ValueError as error:  # a figure less is no reason not to train
            return [*lines, f"bytes of the compiled step are not counted: {error}"]
        names = [name for name in self._expected if self._expected[name] or self._compiled[name]]
        if names:
            both = ", ".join(f"{name} {self._both(name)}" for name in names)
            lines.append(f"bytes a device sends in a step, by formula / compiled: {both}")
        return lines

    def figures(self, row: dict[str, Any]) -> dict[str, float]:
        """What follows from the speed of a row."""
        speed, devices = row["tokens_per_second"], self._config.mesh.size
        found = {
            "model_flops": self._flops * speed * row["step_seconds"],
            "model_flops_per_second": self._flops * speed / devices,
        }
        if self._target is not None:
            found["mfu"] = mfu(self._flops, speed, devices, self._target.peak["bfloat16"])
        for key, sent in (("bytes_expected", self._expected), ("bytes_compiled", self._compiled)):
            used = {name for name in sent if self._expected[name] or self._compiled.get(name)}
            found |= {f"{key}/{name.replace(' ', '_')}": size for name, size in sent.items() if name in used}
        return found

    def _both(self, name: str) -> str:
        expected, compiled = self._expected[name], self._compiled[name]
        return of_bytes(expected) if expected == compiled else f"{of_bytes(expected)} / {of_bytes(compiled)}"


def _sent(moves: Sequence[Any]) -> dict[str, float]:
    return {name: total["wire_bytes"] for name, total in by_class(moves).items()}
