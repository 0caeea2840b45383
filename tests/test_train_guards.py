"""Signals, silence, and how far the loop runs ahead of the devices."""

import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from moejax.config import Config, MeshConfig
from moejax.errors import UserError
from moejax.train import distributed
from moejax.train.guards import MAX_STEPS_IN_FLIGHT, Preempted, Signals, StepGuard, TrainingStopped, Watchdog


def test_signals_are_asked_for_between_steps():
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        assert not signals.requested(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.requested(2)
        assert signals.received == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is before  # a second one ends the process
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_work_in_a_thread_that_cannot_have_handlers():
    answers = []

    def work():
        with Signals() as signals:
            answers.append(signals.requested(1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answers == [False]


def test_exit_codes():
    assert Preempted(signal.SIGTERM, "").exit_code == 75
    assert Preempted(signal.SIGINT, "").exit_code == 130
    assert TrainingStopped("").exit_code == 3


def test_watchdog_names_process_and_step(capfd):
    with Watchdog(silence_seconds=0.2) as watchdog:
        watchdog.beat("step 41")
        time.sleep(0.9)
        watchdog.beat("step 42")
        said = capfd.readouterr().err
        time.sleep(0.05)
    lines = said.splitlines()
    assert 2 <= len(lines) <= 5  # again and again, once per silence
    assert all(line.startswith("moejax: process 0 of 1 on ") and line.endswith("s for step 41") for line in lines)
    assert capfd.readouterr().err == ""


class _Step:
    """The scalars of a step that ends when `end` is called."""

    def __init__(self, bad_streak=0, tokens=10):
        self.ended = threading.Event()
        self.bad_streak, self.tokens = _Later(self.ended, bad_streak), _Later(self.ended, tokens)


class _Later:
    def __init__(self, event, value):
        self.event, self.value = event, value

    def __int__(self):
        assert self.event.wait(20)
        return self.value


def test_loop_waits_for_the_devices_only_when_far_ahead():
    guard = StepGuard(0, 100, Watchdog())
    steps = [_Step() for _ in range(MAX_STEPS_IN_FLIGHT + 1)]
    for number, step in enumerate(steps[:-1], 1):
        guard.push(number, step.bad_streak, step.tokens)  # returns though no step has ended
    assert guard.mark().step == 0
    threading.Timer(0.3, steps[0].ended.set).start()
    start = time.monotonic()
    guard.push(3, steps[2].bad_streak, steps[2].tokens)
    assert time.monotonic() - start >= 0.25
    assert (guard.mark().step, guard.mark().tokens) == (1, 110)
    for step in steps:
        step.ended.set()
    assert guard.wait(3).tokens == 130
    guard.close()


def test_seconds_are_those_of_steps_without_pauses():
    guard = StepGuard(5, 0, Watchdog())
    step = _Step()
    threading.Timer(0.2, step.ended.set).start()
    guard.push(6, step.bad_streak, step.tokens)
    with guard.pause("a pause") as mark:
        assert 0.15 <= mark.seconds <= 2
        time.sleep(0.5)
    last = _Step()
    last.ended.set()
    guard.push(7, last.bad_streak, last.tokens)
    assert guard.wait(7).seconds - mark.seconds < 0.4
    guard.close()


def test_third_bad_step_in_a_row_stops():
    guard = StepGuard(0, 0, Watchdog())
    for number, streak in enumerate([1, 2, 0, 1, 2, 3], 1):
        guard.push(number, jnp.int32(streak), jnp.int32(1))
    with pytest.raises(TrainingStopped, match="step 6: .* 3 times in a row"):
        guard.wait(6)
    guard.close()


def test_mesh_may_be_smaller_than_the_simulated_devices_but_not_larger():
    assert distributed.start(Config(mesh=MeshConfig(data=4))).devices.size == 4
    assert distributed.start(Config(mesh=MeshConfig(data=2, expert=4))).devices.shape == (1, 2, 1, 4, 1)
    with pytest.raises(UserError, match=r"data=8, expert=2.*needs 16 simulated devices.*runs with 8.*restart"):
        distributed.start(Config(mesh=MeshConfig(data=8, expert=2)))
    assert jax.device_count() == 8


def test_flag_that_contradicts_the_mesh_is_named(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    with pytest.raises(UserError, match="XLA_FLAGS sets 8"):
        distributed.start(Config(mesh=MeshConfig(data=16)))


def test_one_of_several_processes_without_its_place(monkeypatch):
    monkeypatch.setenv("MOEJAX_NUM_PROCESSES", "2")
    monkeypatch.delenv("MOEJAX_COORDINATOR", raising=False)
    monkeypatch.delenv("MOEJAX_PROCESS_ID", raising=False)
    with pytest.raises(UserError, match="MOEJAX_COORDINATOR, MOEJAX_PROCESS_ID"):
        distributed.start(Config(mesh=MeshConfig(data=8)))


def test_joining_after_jax_started_is_refused(monkeypatch):
    monkeypatch.setenv("MOEJAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("MOEJAX_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("MOEJAX_PROCESS_ID", "0")
    with pytest.raises(UserError, match="before any other use of JAX"):
        distributed.start(Config(mesh=MeshConfig(data=8)))


def test_cluster_is_found_by_its_environment(monkeypatch):
    for name in ("SLURM_STEP_NUM_TASKS", "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    assert not distributed._in_cluster()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert not distributed._in_cluster()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert distributed._in_cluster()
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert not distributed._in_cluster()
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    assert distributed._in_cluster()


def test_accelerators_must_match_the_mesh(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(UserError, match=r"has 4 devices but there are 8.*product of the mesh's sizes is 8"):
        distributed.start(Config(mesh=MeshConfig(data=4)))
