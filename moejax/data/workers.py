"""Runs the shards of a plan, in this process or in several, with a progress bar.

Workers are plain child processes, one per shard, not `multiprocessing`: that would run the caller's main script again,
and its workers outlive a parent that is killed.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from rich.console import Console

from moejax.data.corpora import Piece
from moejax.data.progress import progress_bar
from moejax.data.shards import Shard, read_shard, write_shard
from moejax.data.tokenizer import Tokenizer
from moejax.errors import UserError


def make_shards(
    plan: Sequence[Sequence[Piece]], partial: Path, tokenizer: Tokenizer, workers: int, console: Console
) -> list[Shard]:
    """Make the shards that are missing in `partial` and return the counts of all.

    Args:
        plan: Pieces of each shard.
        partial: Folder of the shards; plan.json lies there.
        tokenizer: The tokenizer.
        workers: Processes at a time.
        console: Where progress is shown.
    """
    sizes = [sum((p.end or os.path.getsize(p.path)) - p.begin for p in pieces) for pieces in plan]
    missing = [i for i in range(len(plan)) if read_shard(partial, i, tokenizer) is None]
    done = sum(sizes) - sum(sizes[index] for index in missing)
    with progress_bar(console, "tokenizing", sum(sizes)) as show:
        show(done)
        if min(workers, len(missing)) <= 1:
            for index in missing:
                write_shard(partial, index, plan[index], tokenizer, lambda part, done=done: show(done + part))
                done += sizes[index]
                show(done)
        else:
            for index in _in_processes(partial, missing, workers):
                done += sizes[index]
                show(done)
    shards = [read_shard(partial, index, tokenizer) for index in range(len(plan))]
    lost = [index for index, shard in enumerate(shards) if shard is None]
    if lost:
        raise UserError(f"{partial}: shard {lost[0]} disappeared while the work went on; run the same again")
    return [shard for shard in shards if shard is not None]


def _in_processes(partial: Path, missing: Sequence[int], workers: int) -> Iterator[int]:
    """Make shards, `workers` at a time; yield each when it is finished."""
    waiting = list(reversed(missing))
    running: list[tuple[int, subprocess.Popen[bytes], IO[bytes]]] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                index = waiting.pop()
                running.append((index, *_start(partial, index)))
            for item in [item for item in running if item[1].poll() is not None]:
                running.remove(item)
                index, process, errors = item
                with errors:
                    _check(process.returncode, errors)
                yield index
            time.sleep(0.02)
    finally:
        for _, process, errors in running:
            process.terminate()
            process.wait()
            errors.close()


def _start(partial: Path, index: int) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    errors = tempfile.TemporaryFile()  # noqa: SIM115 closed by the caller
    # Each worker has one core: the tokenizers' own threads would compete for the same ones.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "moejax.data.shards", str(partial), str(index)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=errors), errors


def _check(code: int, errors: IO[bytes]) -> None:
    if code == 0:
        return
    errors.seek(0)
    message = errors.read().decode("utf-8", "replace").strip()
    if code == 2:
        raise UserError(message.splitlines()[-1] if message else "a worker stopped with bad input")
    if code < 0:
        raise UserError(
            f"a worker was killed by signal {-code}, perhaps for memory; run the same again with fewer workers"
        )
    raise RuntimeError(f"a worker failed with exit code {code}:\n{message}")
