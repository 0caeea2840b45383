"""What a run measures of itself without slowing it: where the host's time goes, and a trace of chosen steps."""

import contextlib
import gzip
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax

from moejax.config import Config
from moejax.errors import UserError
from moejax.files import replacing
from moejax.train.folder import disk_errors, write_whole
from moejax.train.metrics import Row

PARTS = ("data", "put", "dispatch", "wait", "log", "pause")
"""What the host does between two steps: wait for a batch, hand it to the devices, hand over the step, wait for
devices that are behind, write a row, and evaluate or save while the devices rest."""

HLO_FILE, STEPS_FILE = "step.hlo.txt.gz", "steps.json"
"""Beside a trace: the compiled step's text, and which steps of which devices were traced."""


class Meter(Protocol):
    """Figures of a run that take more than its metrics: model FLOPs, MFU, expected and actual bytes."""

    def compiled(self, text: str) -> Sequence[str]:
        """Read the text of the compiled step, before the first one; return lines to show."""
        ...

    def figures(self, row: Row) -> Row:
        """Return what is known from `tokens_per_second` and `step_seconds` of a row."""
        ...


class HostTime:
    """Adds up the host's seconds by part of the loop."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, step: int) -> None:
        """Forget what was; `step` is the last one done."""
        self._seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._step = step

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count what happens inside as `part`."""
        began = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - began

    def take(self, step: int) -> Row:
        """Return the seconds of one step, a mean over the steps since the last call, and start again."""
        steps = max(step - self._step, 1)
        found = {f"host_seconds/{part}": seconds / steps for part, seconds in self._seconds.items()}
        self.start(step)
        return found


@dataclass(frozen=True)
class Profile:
    """Which steps are traced: `first` to `last`, both included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str, config: Config) -> "Profile":
        """Read START:STOP.

        Raises:
            UserError: It is no range of steps of the run.
        """
        start, colon, stop = text.partition(":")
        if not (colon and start.isdecimal() and stop.isdecimal()):
            raise UserError(f"--profile={text}: must be START:STOP, two numbers of steps, as in --profile 10:12")
        first, last, steps = int(start), int(stop), config.train.steps
        if not 1 <= first <= last:
            raise UserError(f"--profile={text}: steps are counted from 1, and START must not be after STOP")
        if last > steps:
            raise UserError(f"--profile={text}: the run ends with step {steps}; choose earlier steps")
        return cls(first, last)

    def check(self, step: int) -> None:
        """Raise `UserError` if a run that goes on from `step` has passed the first of the steps."""
        if self.first <= step:
            done = f"{step} steps of the run are done"
            raise UserError(f"--profile={self.first}:{self.last}: {done}; choose later steps, or another run.name")


class Tracer:
    """Writes an XProf trace of some steps of process 0 into a folder.

    Args:
        profile: Steps; None for no trace.
        folder: Where it goes.
    """

    def __init__(self, profile: Profile | None, folder: Path) -> None:
        self._profile = profile if jax.process_index() == 0 else None
        self._folder, self.running = folder, False

    def starts(self, step: int) -> bool:
        """Return whether the trace starts before `step`."""
        return self._profile is not None and step == self._profile.first

    def stops(self, step: int) -> bool:
        """Return whether the trace stops after `step`."""
        return self.running and self._profile is not None and step == self._profile.last

    def start(self, text: str, mesh: Any) -> None:
        """Start, with the text of the compiled step and its mesh; no step may be running."""
        assert self._profile is not None
        devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
        about = {"first": self._profile.first, "last": self._profile.last}
        about |= {"devices": len(devices), "device_kind": devices[0].device_kind}
        with disk_errors(self._folder):
            self._folder.mkdir(exist_ok=True)
            with replacing(self._folder / HLO_FILE) as file:
                file.write(gzip.compress(text.encode()))
            write_whole(self._folder / STEPS_FILE, json.dumps(about) + "\n")
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # calls of Python functions would slow the steps and hide them
        jax.profiler.start_trace(str(self._folder), profiler_options=options)
        self.running = True

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Mark a step for XProf."""
        if not self.running:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def stop(self) -> str:
        """Write the trace, once its steps have ended; return a line to show."""
        self.running = False
        with disk_errors(self._folder):
            jax.profiler.stop_trace()
        return f"trace in {self._folder}; sum it up with: moejax inspect trace {self._folder.parent}"

    def close(self) -> None:
        """Stop where the run ends early."""
        if self.running:
            self.stop()
