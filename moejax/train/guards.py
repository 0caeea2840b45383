"""What ends a run early or says that it hangs: signals, steps that are not finite, silence."""

import collections
import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils

MAX_BAD_STREAK = 3
"""Steps in a row without finite loss and gradient after which a run stops."""

MAX_STEPS_IN_FLIGHT = 2
"""Steps handed to the devices and not yet seen to end. More gains nothing and holds more batches."""

SILENCE_SECONDS = 300.0
"""Without a finished step for this long, the watchdog names the step and the process."""


class TrainingStopped(Exception):  # noqa: N818 (an ending)
    """Training stopped itself, because going on would be of no use; exit code 3."""

    exit_code = 3


class Preempted(Exception):  # noqa: N818 (an ending)
    """A signal ended the run after its state was saved.

    Args:
        signum: The signal; SIGTERM gives exit code 75, which schedulers take for "requeue".
        message: Where the run stands and how to go on.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 75 if signum == signal.SIGTERM else 128 + signum


class Signals:
    """Turns SIGTERM and SIGINT into a question that is asked between steps.

    With several processes a signal to any of them counts for all: JAX's preemption service agrees on one step, so
    that all save the same state. It watches SIGTERM itself; SIGINT is passed on to it. A second signal ends the
    process at once.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._agreed = jax.distributed.is_initialized()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for signum in [signal.SIGINT] if self._agreed else [signal.SIGINT, signal.SIGTERM]:
                self._previous[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()

    def _receive(self, signum: int, _: FrameType | None) -> None:
        self.received = signum
        self._restore()
        if self._agreed:
            signal.raise_signal(signal.SIGTERM)

    def requested(self, step: int) -> bool:
        """Return whether to save and leave after `step`; the same answer in every process. Call once per step."""
        if not self._agreed:
            return self.received is not None
        if multihost_utils.reached_preemption_sync_point(step):
            self.received = self.received or signal.SIGTERM
            return True
        return False


class Watchdog:
    """A thread that says on standard error which step, in which process, has not ended for a long time."""

    def __init__(self, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._silence = silence_seconds
        self._beat = (time.monotonic(), "the first step (its compilation included)")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def beat(self, waiting_for: str) -> None:
        """Note that something ended, and what comes next."""
        self._beat = (time.monotonic(), waiting_for)

    def _watch(self) -> None:
        warned = 0.0
        while not self._stop.wait(min(1.0, self._silence / 4)):
            since, waiting_for = self._beat
            now = time.monotonic()
            if now - max(since, warned) >= self._silence:
                warned = now
                where = f"process {jax.process_index()} of {jax.process_count()} on {socket.gethostname()}"
                with contextlib.suppress(OSError):
                    sys.stderr.write(f"moejax: {where} has waited {now - since:.0f} s for {waiting_for}\n")
                    sys.stderr.flush()


class Mark(NamedTuple):
    """How far a run has come: `seconds` of training, without pauses, and `tokens` up to the end of `step`."""

    step: int
    seconds: float
    tokens: int


class StepGuard:
    """Follows steps to their end, a few steps behind the loop, so that the devices never wait for the host.

    A thread waits for each step and notes the time, so that times are those of the devices. Close it at the end.

    Args:
        step: Step that the run starts from.
        tokens: Tokens trained on before it.
        watchdog: Told of every step that ends.
    """

    def __init__(self, step: int, tokens: int, watchdog: Watchdog) -> None:
        self._marks = {step: Mark(step, 0.0, tokens)}
        self._newest = self._marks[step]
        self._watchdog = watchdog
        self._thread = ThreadPoolExecutor(1, "step-guard")
        self._flying: collections.deque[tuple[int, Future[tuple[int, int, float]]]] = collections.deque()
        self._since = time.monotonic()

    def mark(self) -> Mark:
        """Return how far the run has come for certain."""
        return self._newest

    def push(self, step: int, bad_streak: Any, tokens: Any) -> None:
        """Hand over a step just dispatched, with its streak of bad steps and its tokens (device scalars).

        Raises:
            TrainingStopped: Loss or gradient was not finite `MAX_BAD_STREAK` times in a row.
        """
        self._flying.append((step, self._thread.submit(self._read, step, bad_streak, tokens)))
        while len(self._flying) > MAX_STEPS_IN_FLIGHT:
            self._finish()

    def wait(self, step: int) -> Mark:
        """Wait until `step` has ended, and return how far the run had come then; steps before are forgotten."""
        while self._newest.step < step:
            self._finish()
        self._marks = {key: mark for key, mark in self._marks.items() if key >= step}
        return self._marks[step]

    @contextlib.contextmanager
    def pause(self, what: str) -> Iterator[Mark]:
        """Let all steps end, and leave out of `seconds` what happens inside."""
        while self._flying:
            self._finish()
        self._watchdog.beat(what)
        yield self._newest
        self._since = time.monotonic()
        self._watchdog.beat(f"step {self._newest.step + 1}")

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _read(self, step: int, bad_streak: Any, tokens: Any) -> tuple[int, int, float]:
        values = int(bad_streak), int(tokens)
        self._watchdog.beat(f"step {step + 1}")
        return *values, time.monotonic()

    def _finish(self) -> None:
        step, result = self._flying.popleft()
        bad_streak, tokens, ended = result.result()
        self._newest = Mark(step, self._newest.seconds + ended - self._since, self._newest.tokens + tokens)
        self._marks[step], self._since = self._newest, ended
        if bad_streak >= MAX_BAD_STREAK:
            raise TrainingStopped(
                f"step {step}: loss or gradient was not finite {bad_streak} times in a row, so nothing is learned any "
                "more: lower optimizer.learning_rate, or look at the data; the same command goes on from the newest "
                "checkpoint"
            )
