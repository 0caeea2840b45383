"""`moejax launch local`: several processes on this machine that train together, for trying multi-host runs."""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any

from moejax.errors import UserError

EXIT_PREEMPTED = 75
"""Exit code of a run that saved and wants to be started again."""
GRACE_SECONDS = 10.0
"""Time that processes get to end after one of them failed."""
PREEMPTED_GRACE_SECONDS = 120.0
"""The same after one of them was preempted: the others may still be writing the checkpoint."""
_PR_SET_PDEATHSIG = 1


def register(subparsers: Any) -> None:
    """Add `launch`."""
    parser = subparsers.add_parser(
        "launch",
        help="start several processes of one run",
        description="Start several processes of one run. For clusters, see the scripts in launch/.",
    )
    where = parser.add_subparsers(dest="where", metavar="WHERE", required=True)
    local = where.add_parser(
        "local",
        usage="moejax launch local --processes N -- COMMAND [ARGUMENT ...]",
        help="on this machine",
        description="Start N processes of one moejax command on this machine, joined by jax.distributed. Their output "
        "is prefixed by their rank. When one fails, all are ended; the exit code is that of the first that failed.",
        epilog="example: moejax launch local --processes 2 -- train configs/quickstart.yaml",
    )
    local.add_argument("--processes", type=int, required=True, metavar="N", help="number of processes")
    local.set_defaults(run=run, takes_after=True)


def run(args: argparse.Namespace) -> int:
    """Start the processes, wait for them, return the exit code of the first that failed, or 0."""
    if args.processes < 1:
        raise UserError(f"--processes {args.processes}: must be at least 1")
    if not args.after:
        raise UserError("no command to start: write it after --, as in '-- train CONFIG'")
    return Group(args.processes, [sys.executable, "-m", "moejax", *args.after]).wait()


class Group:
    """Processes that live and die together. SIGINT and SIGTERM to this process go on to each of them.

    Args:
        num_processes: How many to start.
        command: What each runs. MOEJAX_COORDINATOR, MOEJAX_NUM_PROCESSES and MOEJAX_PROCESS_ID tell it its place.
    """

    def __init__(self, num_processes: int, command: list[str]) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.signals = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._forward)
        coordinator = f"127.0.0.1:{_free_port()}"
        parent = os.getpid()
        for rank in range(num_processes):
            place = {
                "MOEJAX_COORDINATOR": coordinator,
                "MOEJAX_NUM_PROCESSES": str(num_processes),
                "MOEJAX_PROCESS_ID": str(rank),
            }
            self.processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **place, "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # a terminal's Ctrl-C then reaches them once, through us
                    preexec_fn=lambda: _die_with(parent),
                )
            )
        self.readers = [
            threading.Thread(target=_relay, args=(rank, process), daemon=True)
            for rank, process in enumerate(self.processes)
        ]
        for reader in self.readers:
            reader.start()

    def wait(self) -> int:
        """Wait for all; end the rest when one fails. Return the first failure's code (128 + signal if killed), or 0."""
        failed: int | None = None
        deadline = float("inf")
        while any(code is None for code in self._codes()):
            time.sleep(0.1)
            codes = [code for code in self._codes() if code]
            if codes and failed is None:
                failed = codes[0]
                preempted = failed == EXIT_PREEMPTED
                deadline = time.monotonic() + (PREEMPTED_GRACE_SECONDS if preempted else GRACE_SECONDS)
                self._send(signal.SIGTERM)
            if time.monotonic() > deadline:
                self._send(signal.SIGKILL)
        for reader in self.readers:
            reader.join(timeout=5)
        code = failed or next((code for code in self._codes() if code), 0)
        return 128 - code if code < 0 else code

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def _send(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Send a signal on; the second one, from somebody who has lost patience, kills."""
        self.signals += 1
        self._send(number if self.signals == 1 else signal.SIGKILL)


def _relay(rank: int, process: subprocess.Popen[str]) -> None:
    """Copy the output of one process line by line, with its rank before each line."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[Gloo] Rank "):
            continue  # the CPU's collectives report every connection that they make
        sys.stdout.write(f"[{rank}] {line.rstrip()}\n")
        sys.stdout.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _die_with(parent: int) -> None:
    """In the child, before it becomes the command: have Linux kill it when the launcher is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
