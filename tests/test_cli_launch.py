"""`moejax launch local`: processes that live and die together. Plain scripts stand in for training."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

START = "import sys; from moejax.cli.launch import Group; sys.exit(Group(int(sys.argv[1]), sys.argv[2:]).wait())"

PLACE = """
import os
rank, count = os.environ["MOEJAX_PROCESS_ID"], os.environ["MOEJAX_NUM_PROCESSES"]
print("[Gloo] Rank 0 is connected to 1 peer ranks.")
print(f"{rank} of {count} at {os.environ['MOEJAX_COORDINATOR']}")
"""

RANK_1_LEAVES = """
import os, sys, time
if os.environ["MOEJAX_PROCESS_ID"] == "1":
    sys.exit(CODE)
time.sleep(60)
"""

RANK_1_IS_KILLED = RANK_1_LEAVES.replace("sys.exit(CODE)", "os.kill(os.getpid(), 9)")

SAVES_ON_SIGTERM = """
import signal, sys, time
def save(number, frame):
    print("saving", flush=True)
    time.sleep(0.2)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""

DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", os.getpid(), flush=True)
time.sleep(60)
"""


def start(script: str, num_processes: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START, str(num_processes), sys.executable, "-c", script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(launcher: subprocess.Popen[str], timeout: float = 30) -> tuple[int, str]:
    with launcher:
        out, err = launcher.communicate(timeout=timeout)
    assert err == ""
    return launcher.returncode, out


def lines_until_ready(launcher: subprocess.Popen[str], num_processes: int = 2) -> list[str]:
    assert launcher.stdout is not None
    return [launcher.stdout.readline() for _ in range(num_processes)]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_every_process_knows_its_place_and_output_has_its_rank() -> None:
    code, out = finish(start(PLACE, 3))
    lines = sorted(out.splitlines())
    assert code == 0
    assert [line.partition(" at ")[0] for line in lines] == ["[0] 0 of 3", "[1] 1 of 3", "[2] 2 of 3"]
    addresses = {line.partition(" at ")[2] for line in lines}
    assert len(addresses) == 1
    assert addresses.pop().startswith("127.0.0.1:")


@pytest.mark.parametrize("code", [1, 2, 3])
def test_one_fails_all_end_with_its_code(code: int) -> None:
    begin = time.monotonic()
    assert finish(start(RANK_1_LEAVES.replace("CODE", str(code)))) == (code, "")
    assert time.monotonic() - begin < 20


def test_one_killed_all_end() -> None:
    assert finish(start(RANK_1_IS_KILLED)) == (128 + signal.SIGKILL, "")


def test_a_process_that_is_done_does_not_end_the_others() -> None:
    script = RANK_1_LEAVES.replace("CODE", "0").replace("sleep(60)", "sleep(1); print('done')")
    assert finish(start(script)) == (0, "[0] done\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_go_on_to_all(number: signal.Signals) -> None:
    launcher = start(SAVES_ON_SIGTERM.replace("signal.SIGTERM", f"signal.{number.name}"))
    assert sorted(lines_until_ready(launcher)) == ["[0] ready\n", "[1] ready\n"]
    launcher.send_signal(number)
    code, out = finish(launcher)
    assert code == 75
    assert sorted(out.splitlines()) == ["[0] saving", "[1] saving"]


def test_a_second_signal_kills() -> None:
    launcher = start(DEAF)
    pids = [int(line.split()[-1]) for line in lines_until_ready(launcher)]
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert all(map(is_alive, pids))
    launcher.send_signal(signal.SIGINT)
    assert finish(launcher)[0] == 128 + signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process die with its parent")
def test_no_process_outlives_a_killed_launcher() -> None:
    launcher = start(DEAF)
    pids = [int(line.split()[-1]) for line in lines_until_ready(launcher)]
    launcher.kill()
    with launcher:
        launcher.wait(timeout=10)
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def test_the_command_line_starts_moejax() -> None:
    command = [sys.executable, "-m", "moejax", "launch", "local", "--processes=2", "--", "lunch", "--mesh.expert=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(os.environ), check=False)
    assert done.returncode == 2
    # the first to fail may end the other before it says the same
    assert {line[3:] for line in done.stdout.splitlines()} == {done.stdout.splitlines()[0][3:]}
    assert done.stdout.startswith(("[0] error: 'lunch': no such command", "[1] error: 'lunch': no such command"))


@pytest.mark.parametrize("count", ["0", "-1", "two"])
def test_a_bad_number_of_processes(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    from moejax.cli.main import main

    assert main(["launch", "local", f"--processes={count}", "--", "train"]) == 2
    assert "--processes" in capsys.readouterr().err
