"""Training from Python: what notebooks and the command line call."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from moejax.config import Config
from moejax.data.loader import Loader
from moejax.errors import UserError
from moejax.train import distributed
from moejax.train.checkpoint import Checkpoints
from moejax.train.folder import RunFolder, model_changes
from moejax.train.loop import Session
from moejax.train.measure import Meter, Profile
from moejax.train.metrics import Row, read_rows
from moejax.train.program import Program
from moejax.train.report import Report, final_table


class Trainer:
    """Trains the model of a configuration; goes on from the newest checkpoint of the run, if there is one.

    Args:
        config: The run.
        make_program: Compiles a configuration for a mesh; a `Program` by default.
        make_loader: Makes the loader of a split, `train` or `heldout`; a `Loader` by default.
        make_meter: Makes what adds model FLOPs, MFU and bytes to rows, as `moejax.Meter`; None for none of them.
        profile: Steps to trace into RUN/profile, as START:STOP, both included; None for no trace.

    Raises:
        UserError: The mesh does not fit the machine, or `profile` is no range of steps.
    """

    def __init__(
        self,
        config: Config,
        make_program: Callable[[Config, Mesh], Any] = Program,
        make_loader: Callable[..., Any] = Loader,
        make_meter: Callable[[Config], Meter] | None = None,
        profile: str | None = None,
    ) -> None:
        self._profile = Profile.parse(profile, config) if profile is not None else None
        self._make_meter = make_meter
        self.mesh = distributed.start(config)
        self.config = config
        self.folder = RunFolder(config)
        self._make_program, self._make_loader = make_program, make_loader

    def run(self) -> list[Row]:
        """Train until `train.steps`; return the rows of metrics.jsonl, those of earlier sessions included.

        Raises:
            UserError: Bad input: data, a checkpoint of another model, a full disk.
            TrainingStopped: Loss or gradient was not finite several times in a row.
            Preempted: A signal came; the state is saved.
        """
        options = self.config.checkpoint
        self.folder.make()
        checkpoints = Checkpoints(self.folder.checkpoints, options.keep_last, options.keep_every)
        with contextlib.closing(checkpoints):
            step = checkpoints.newest()
            if self._profile is not None:
                self._profile.check(step or 0)
            report = Report(self.config, step or 0, quiet=jax.process_index() != 0)
            for name in checkpoints.set_aside:
                report.say(f"checkpoint {name} is not whole, so it is set aside as incomplete-{name}")
            if step is None:
                return self._session(checkpoints, report, None, {}).run()
            meta = checkpoints.meta(step)
            self._refuse_changes(checkpoints, step, meta)
            if step >= self.config.train.steps:
                return self._say_complete(report, step)
            return self._session(checkpoints, report, step, meta).run()

    def _session(self, checkpoints: Checkpoints, report: Report, step: int | None, meta: dict[str, Any]) -> Session:
        quiet = jax.process_index() != 0
        train, held_out = (self._make_loader(self.config, split, quiet=quiet) for split in ("train", "heldout"))
        program = self._make_program(self.config, self.mesh)
        meter = self._make_meter(self.config) if self._make_meter else None
        parts = (self.config, self.folder, program, train, held_out, checkpoints, report, step, meta)
        return Session(*parts, meter, self._profile)

    def _refuse_changes(self, checkpoints: Checkpoints, step: int, meta: dict[str, Any]) -> None:
        """Refuse to start over in a used folder, or to go on with another model than the checkpoint's."""
        if not self.config.checkpoint.resume:
            raise UserError(
                f"{self.folder.path}: holds checkpoints up to step {step}, and checkpoint.resume=false would start "
                "over in the same folder: choose another run.name, or delete this folder"
            )
        if changes := model_changes(meta["config"], self.config):
            wanted = self._make_program(self.config, self.mesh).abstract_state.params
            tensors = ", ".join(checkpoints.differences(step, {"params": wanted})) or "none in shape"
            raise UserError(
                f"{self.folder.path}: holds a run of another model. Options that differ: {', '.join(changes)}. "
                f"Tensors that differ: {tensors}. Use another run.name, or the model in {self.folder.config}"
            )

    def _say_complete(self, report: Report, step: int) -> list[Row]:
        rows = read_rows(self.folder.metrics)
        report.say(
            f"run {self.config.run.name} is complete: {step} of {self.config.train.steps} steps are done. To go on, "
            f"raise train.steps, as in --train.steps={2 * step}; for a new run, choose another run.name"
        )
        report.console.print(final_table(self.config, self.folder, rows))
        return rows
