"""What a person sees of a run: the progress bar or plain lines, and the table at the end."""

import math
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from moejax.config import Config
from moejax.train.folder import RunFolder
from moejax.train.metrics import Row


class Report:
    """Shows progress on standard output: a bar on a terminal, else one plain line per logged step.

    Args:
        config: Uses `train.steps`.
        step: Step that the run goes on from.
        quiet: Show nothing: in processes other than the first.
    """

    def __init__(self, config: Config, step: int, quiet: bool) -> None:
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._first, self._total = step, config.train.steps
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if self.console.is_terminal and not quiet:
            text = TextColumn("loss {task.fields[loss]}  {task.fields[speed]}  {task.fields[left]} left")
            self._bar = Progress(TextColumn("training"), BarColumn(), MofNCompleteColumn(), text, console=self.console)
            self._task = self._bar.add_task("", total=self._total, completed=step, loss="-", speed="-", left="-")

    def __enter__(self) -> "Report":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, markup=False)

    def row(self, row: Row) -> None:
        """Show a logged step."""
        seen = _shown(row)
        speed = seen["tokens_per_second"] + (f" tokens/s, {row['mfu']:.1%} MFU" if "mfu" in row else " tokens/s")
        compiled = row["step"] == self._first + 1  # this step's time says nothing about those to come
        left = "-" if compiled else seconds((self._total - row["step"]) * row["step_seconds"])
        if self._bar:
            self._bar.update(self._task, completed=row["step"], loss=seen["loss"], speed=speed, left=left)
        else:
            self.say(f"step {row['step']}/{self._total}  loss {seen['loss']}  {speed}  {left} left")
        if "eval/loss" in row:
            self.say(
                f"step {row['step']}: held-out loss {seen['eval/loss']}, {seen['eval/bits_per_byte']} bits per byte"
            )


def _shown(row: Row) -> dict[str, str]:
    def text(key: str) -> str:
        value = row.get(key)
        if value is None:
            return "not finite" if key in row else "-"
        return f"{value:,.0f}" if key == "tokens_per_second" else f"{value:.4f}"

    return {key: text(key) for key in ("loss", "tokens_per_second", "eval/loss", "eval/bits_per_byte")}


def seconds(value: float) -> str:
    """Return a duration as h:mm:ss."""
    whole = math.ceil(value)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def last(history: list[Row], key: str) -> Any:
    """Return the newest value of a metric, or None."""
    return next((row[key] for row in reversed(history) if row.get(key) is not None), None)


def final_table(config: Config, folder: RunFolder, history: list[Row]) -> Table:
    """Return the table that ends a run: the result, where everything is, what to try next."""
    table = Table(title=f"run {config.run.name}: {config.train.steps} steps", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    bits, loss, tokens = (last(history, key) for key in ("eval/bits_per_byte", "eval/loss", "tokens"))
    if bits is not None:
        table.add_row("held-out text", f"{bits:.3f} bits per byte (loss {loss:.4f})")
    if tokens is not None:
        table.add_row("trained on", f"{tokens:,} tokens")
    table.add_row("metrics", str(folder.metrics))
    if config.log.tensorboard:
        table.add_row("curves", f"tensorboard --logdir {folder.tensorboard}")
    table.add_row("checkpoints", str(folder.checkpoints))
    table.add_row("configuration", str(folder.config))
    table.add_section()
    for what, command in next_commands(config, folder):
        table.add_row(what, command)
    return table


def next_commands(config: Config, folder: RunFolder) -> list[tuple[str, str]]:
    """Return what to try next with a finished run, as pairs of purpose and command."""
    return [
        ("see it write", f'moejax generate {folder.path} --prompt "def "'),
        ("evaluate it", f"moejax eval {folder.path}"),
        ("train on", f"moejax train {folder.config} --train.steps={2 * config.train.steps}"),
    ]
