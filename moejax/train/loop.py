"""The loop over steps: batches in; metrics, evaluations and checkpoints out."""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NoReturn

import jax

from moejax.config import Config
from moejax.errors import UserError
from moejax.moe.alarm import COUNT, GerrymanderingAlarm
from moejax.train.checkpoint import Checkpoints
from moejax.train.evaluate import HeldOut
from moejax.train.folder import RunFolder
from moejax.train.guards import Preempted, Signals, StepGuard, TrainingStopped, Watchdog
from moejax.train.measure import HostTime, Meter, Profile, Tracer
from moejax.train.metrics import MetricWriter, Row
from moejax.train.report import Report, final_table


class Session:
    """One stretch of a run: from a checkpoint or from scratch to the last step, or to a signal.

    Args:
        config: The run.
        folder: Its folder.
        program: Compiled functions, as `moejax.train.program.Program`.
        train_data: Loader of the training split.
        held_out: Loader of the held-out split.
        checkpoints: Where to save, and to restore from.
        report: Where to show progress.
        step: Checkpoint to go on from; None to start from scratch.
        meta: What is saved beside that checkpoint.
        meter: Adds figures to rows.
        profile: Steps to trace.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        program: Any,
        train_data: Any,
        held_out: Any,
        checkpoints: Checkpoints,
        report: Report,
        step: int | None,
        meta: dict[str, Any],
        meter: Meter | None = None,
        profile: Profile | None = None,
    ) -> None:
        self.config, self.folder, self.program, self.train_data = config, folder, program, train_data
        self.checkpoints, self.report = checkpoints, report
        self.held_out = HeldOut(config, held_out)
        self.first = step or 0
        self.meter, self.host = meter, HostTime()
        self.tracer = Tracer(profile, folder.profile)
        self.data = {"fingerprint": train_data.fingerprint, "seed": config.run.seed}
        self.data |= {"batch_size": config.data.batch_size, "sequence_length": config.data.sequence_length}
        if step is None:
            self.state = program.init(config.run.seed)
        else:
            self._refuse_other_data(meta)
            self.state = checkpoints.restore(step, program.abstract_state)
            report.say(f"going on from step {step} of {folder.path}")
        if jax.process_index() == 0:
            folder.write(config)
        if config.moe.routing != "learned":
            report.say(f"warning: moe.routing={config.moe.routing}: a benchmark mode; the model learns no routing")
        self.watchdog = Watchdog()
        self.guard = StepGuard(self.first, meta.get("tokens", 0), self.watchdog)
        self.writer = MetricWriter(config, folder, self.first)
        self.alarm = GerrymanderingAlarm()
        for row in self.writer.history:
            self.alarm.update(row)
        self.saved = step
        self._pending: tuple[int, dict[str, Any]] | None = None
        self._base = self.guard.mark()

    def _refuse_other_data(self, meta: dict[str, Any]) -> None:
        names = {"seed": "run.seed", "fingerprint": "data.corpus, data.mixture or data.tokenizer"}
        for key, now in self.data.items():
            if meta["data"][key] != now:
                what = names.get(key, f"data.{key}")
                detail = "" if key == "fingerprint" else f" ({meta['data'][key]} -> {now})"
                raise UserError(
                    f"{self.folder.path}: cannot go on in the same order of batches, because of a change of {what}"
                    f"{detail}: use what is in {self.folder.config}, or another run.name"
                )

    def run(self) -> list[Row]:
        """Take the steps; return the rows of metrics.jsonl."""
        batches = self.train_data.batches(self.first, rows=self.program.rows)
        closing = contextlib.closing
        with (
            closing(self.writer),
            closing(self.guard),
            closing(self.tracer),
            self.report,
            self.watchdog,
            Signals() as signals,
        ):
            try:
                self._loop(batches, signals)
                self._flush()
            except TrainingStopped:
                self._flush()
                raise
            self.watchdog.beat("the last checkpoint")
            self.checkpoints.wait()
        self.report.console.print(final_table(self.config, self.folder, self.writer.history))
        return self.writer.history

    def _loop(self, batches: Iterator[Any], signals: Signals) -> None:
        total, every, host = self.config.train.steps, self.config, self.host
        train_step = self._compile()
        host.start(self.first)
        for step in range(self.first + 1, total + 1):
            with host("data"):
                batch = next(batches)
            with host("put"):
                batch = self.program.put(batch)
            if self.tracer.starts(step):
                with host("pause"), self.guard.pause("the trace"):
                    jax.block_until_ready(self.state)
                    self.tracer.start(train_step.as_text(), self.program.mesh)
            with host("dispatch"), self.tracer.step(step):
                self.state, metrics = train_step(self.state, batch)
            with host("wait"):
                self.guard.push(step, metrics["bad_streak"], metrics["tokens"])
            if self.tracer.stops(step):
                with host("pause"), self.guard.pause("the trace"):
                    jax.block_until_ready(self.state)
                    self.report.say(self.tracer.stop())
            evaluate = step == total or step % every.eval.every == 0
            if evaluate or step % every.log.every == 0:
                with host("log"):
                    self._flush()
                self._pending = (step, metrics | host.take(step))
            with host("pause"):
                if evaluate:
                    self._evaluate()
                if step == total or step % every.checkpoint.every == 0:
                    self._save(step)
            if signals.requested(step) and step < total:
                self._leave(step, signals)

    def _compile(self) -> Any:
        compiled = self.program.compiled_step
        if self.meter is not None:
            for line in self.meter.compiled(compiled.as_text()):
                self.report.say(line)
        return compiled

    def _flush(self) -> None:
        """Write the row logged last, one interval late: its step has ended by now, or nearly, and others run on."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        if self._base.step == self.first and step > self.first + 1:
            self._base = self.guard.wait(self.first + 1)  # the first step includes compilation
        mark = self.guard.wait(step)
        row = {"step": step, **jax.device_get(metrics), "tokens": mark.tokens}
        seconds = max(mark.seconds - self._base.seconds, 1e-9)
        row["tokens_per_second"] = (mark.tokens - self._base.tokens) / seconds
        row["step_seconds"] = seconds / (step - self._base.step)
        if self.meter is not None:
            row |= self.meter.figures(row)
        del row["bad_streak"]
        self._base = mark
        if warning := self.alarm.update(row):
            self.report.say(f"step {step}: {warning}")
        row[COUNT] = self.alarm.count
        self.writer.write(row)
        self.report.row(row)
        self.checkpoints.check()

    def _evaluate(self) -> None:
        assert self._pending is not None
        with self.guard.pause("the evaluation"):
            self._pending[1].update(self.held_out.evaluate(self.program, self.state.params))

    def _save(self, step: int) -> None:
        """Save, once all steps have ended well."""
        with self.guard.pause("the checkpoint") as mark:
            meta = {"step": step, "tokens": mark.tokens, "data": self.data, "config": asdict(self.config)}
            self.checkpoints.save(self.state, step, meta)
        self.saved = step

    def _leave(self, step: int, signals: Signals) -> NoReturn:
        self._flush()
        if self.saved != step:
            self._save(step)
        self.checkpoints.wait()
        name = signal.Signals(signals.received or signal.SIGTERM).name
        raise Preempted(
            signals.received or signal.SIGTERM,
            f"{name}: step {step} of {self.config.train.steps} is saved in {self.folder.path}; "
            "the same command goes on from there",
        )
