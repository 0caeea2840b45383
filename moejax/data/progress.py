"""The progress bar of work on text."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_LONG = 2**27  # bytes that take long enough to say so in a log


@contextmanager
def progress_bar(console: Console, label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar in bytes; yield a function that takes the number of bytes done so far.

    Where there is no terminal, long work is announced by one line instead.

    Args:
        console: Where to show it.
        label: What is being done.
        total: Bytes of everything. Compressed files hold more text than that: the bar then waits at its end.
    """
    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    live = console.is_terminal or console.is_jupyter
    if not live and total > _LONG:
        console.print(f"{label} {total / 2**20:,.0f} MiB")
    with Progress(*columns, console=console, transient=True, disable=not live) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.update(task, completed=min(done, total))
