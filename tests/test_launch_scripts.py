"""The scripts of launch/ and .ci/run: they parse, and what can run without a cluster runs with stand-ins."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_parses(path: Path) -> None:
    assert os.access(path, os.X_OK)
    assert path.read_text().splitlines()[0] == "#!/usr/bin/env bash"
    subprocess.run(["bash", "-n", path], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    assert shellcheck.exists(), "install the development tools: make setup"
    done = subprocess.run([shellcheck, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def stand_in(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def run(script: str, arguments: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    bash = shutil.which("bash")
    assert bash
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    command = [bash, str(ROOT / "launch" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (2, False), (3, False), (75, True)])
def test_slurm_requeues_a_preempted_run_alone(tmp_path: Path, code: int, requeued: bool) -> None:
    stand_in(tmp_path, "srun", f'printf "%s|" "$@"; echo; exit {code}')
    stand_in(tmp_path, "scontrol", 'echo "scontrol $*"')
    done = run("slurm.sh", ["my config.yaml", "--train.steps=5"], tmp_path, SLURM_JOB_ID="17")
    assert done.returncode == code
    assert "|moejax|train|my config.yaml|--train.steps=5|\n" in done.stdout
    assert ("scontrol requeue 17" in done.stdout) is requeued


def test_slurm_has_time_to_save() -> None:
    text = (ROOT / "launch" / "slurm.sh").read_text()
    assert "#SBATCH --signal=TERM@300\n" in text
    assert "#SBATCH --requeue\n" in text


def test_slurm_wants_a_configuration(tmp_path: Path) -> None:
    assert run("slurm.sh", [], tmp_path).returncode == 2


def test_tpu_trains_on_every_worker(tmp_path: Path) -> None:
    stand_in(tmp_path, "gcloud", 'printf "%s\\n" "$@"')
    done = run("tpu_vm.sh", ["train", "pod", "zone-a", "my config.yaml", "--mesh.expert=8"], tmp_path)
    assert done.returncode == 0, done.stderr
    arguments = done.stdout.splitlines()
    assert {"ssh", "pod", "--zone=zone-a", "--worker=all"} <= set(arguments)
    assert (
        arguments[-1].rstrip() == r"--command=cd moejax && exec .venv/bin/moejax train my\ config.yaml --mesh.expert=8"
    )


@pytest.mark.parametrize("arguments", [[], ["train", "pod", "zone-a"], ["stop", "pod", "zone-a"]], ids=" ".join)
def test_tpu_usage(tmp_path: Path, arguments: list[str]) -> None:
    stand_in(tmp_path, "gcloud", "exit 1")
    done = run("tpu_vm.sh", arguments, tmp_path)
    assert done.returncode == 2
    assert "launch/tpu_vm.sh train NAME ZONE CONFIG" in done.stderr


def test_jobset_restarts_a_preempted_run() -> None:
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "launch" / "jobset.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["ServiceAccount", "Role", "RoleBinding", "JobSet"]
    spec = documents[-1]["spec"]
    (restart,) = spec["failurePolicy"]["rules"]
    assert restart["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert restart["onJobFailureReasons"] == ["PodFailurePolicy"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    on_code = job["podFailurePolicy"]["rules"][0]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert on_code["action"] == "FailJob"
    assert on_code["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [75]}
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"]
    assert container["command"][:2] == ["moejax", "train"]
    mesh = [int(item.partition("=")[2]) for item in container["args"] if item.startswith("--mesh.")]
    gpus = job["parallelism"] * container["resources"]["limits"]["nvidia.com/gpu"]
    assert mesh[0] * mesh[1] == gpus


def test_jobset_configuration_is_valid() -> None:
    from moejax import load_config

    document = list(yaml.safe_load_all((ROOT / "launch" / "jobset.yaml").read_text()))[-1]
    (container,) = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    config = load_config(ROOT / container["command"][2], [item.removeprefix("--") for item in container["args"]])
    assert config.mesh.size == 32
