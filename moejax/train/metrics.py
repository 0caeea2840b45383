"""Metrics of a run: `metrics.jsonl`, TensorBoard and Weights & Biases. Process 0 writes; every process has the rows."""

import contextlib
import importlib.util
import json
import math
import socket
import time
from pathlib import Path
from typing import Any, Protocol, TextIO

import jax
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import RecordWriter

from moejax.config import Config
from moejax.errors import UserError
from moejax.train.folder import RunFolder, disk_errors, write_whole

Row = dict[str, Any]

_FLUSH_SECONDS = 10.0
"""How long curves may wait for the disk; rows of metrics.jsonl do not wait."""


class _Sink(Protocol):
    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class MetricWriter:
    """Writes rows, one per logged step, to every place that the configuration asks for.

    Args:
        config: Uses `log` and `run`.
        folder: The run's folder.
        step: Step that the run goes on from; rows past it, from a session that was killed, are dropped.

    Raises:
        UserError: Weights & Biases is asked for and not installed, or the disk is full.
    """

    def __init__(self, config: Config, folder: RunFolder, step: int) -> None:
        self.history = [row for row in read_rows(folder.metrics) if row["step"] <= step]
        self._sinks: list[_Sink] = []
        if config.log.wandb and importlib.util.find_spec("wandb") is None:
            raise UserError("log.wandb=true: Weights & Biases is not installed: pip install wandb, or log.wandb=false")
        if jax.process_index() != 0:
            return
        self._sinks.append(_JsonLines(folder.metrics, self.history))
        if config.log.tensorboard:
            self._sinks.append(_TensorBoard(folder.tensorboard, step))
        if config.log.wandb:
            self._sinks.append(_Wandb(config, folder))

    def write(self, row: Row) -> None:
        """Write one row. Values that are not finite become null: JSON has no word for them."""
        clean = {key: _number(value) for key, value in row.items()}
        self.history.append(clean)
        for sink in self._sinks:
            sink.write(clean)

    def close(self) -> None:
        """Flush and close every file."""
        with contextlib.ExitStack() as stack:  # closes every one, whatever the others raise
            for sink in self._sinks:
                stack.callback(sink.close)
            self._sinks = []


def _number(value: Any) -> Any:
    if getattr(value, "ndim", 0):
        return value.tolist()
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a metrics.jsonl, without a last line that was cut off; empty if there is no file."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


class _JsonLines:
    def __init__(self, path: Path, rows: list[Row]) -> None:
        self._path = path
        write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        with disk_errors(self._path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        with disk_errors(self._path):
            self._file.close()


class _TensorBoard:
    """An event file with the numbers of rows; lists are for metrics.jsonl alone.

    Written here and now: SummaryWriter's queue and threads gain nothing at a row per logged step, and on a full disk
    they print errors of their own at exit.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        with disk_errors(path):
            path.mkdir(exist_ok=True)
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{step}"
            self._file = RecordWriter(str(path / name))
        self._flushed = time.monotonic()
        self._add(file_version="brain.Event:2")
        if step:  # hides what an earlier session wrote past the checkpoint
            self._add(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def _add(self, **fields: Any) -> None:
        with disk_errors(self._path):
            self._file.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def write(self, row: Row) -> None:
        numbers = {key: value for key, value in row.items() if key != "step" and isinstance(value, int | float)}
        values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        self._add(step=row["step"], summary=Summary(value=values))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            with disk_errors(self._path):
                self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        with disk_errors(self._path):
            self._file.close()


class _Wandb:
    def __init__(self, config: Config, folder: RunFolder) -> None:
        import wandb  # pyright: ignore[reportMissingImports]  # optional: only here if asked for

        self._run = wandb.init(
            dir=str(folder.path), name=config.run.name, id=config.run.name, resume="allow", config=vars(config)
        )

    def write(self, row: Row) -> None:
        self._run.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])

    def close(self) -> None:
        self._run.finish()
