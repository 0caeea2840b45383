"""The wheel: built, installed apart from this clone, it finds its presets."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _python(folder: Path) -> str:
    return str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")


@pytest.mark.slow
def test_an_installed_wheel_finds_models_and_configurations(tmp_path) -> None:
    """Its dependencies are those of this interpreter; the code is the wheel's alone."""
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("moejax-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = _python(tmp_path / "venv")
    subprocess.run([python, "-m", "pip", "install", "--no-deps", "--quiet", wheel], check=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (Path(site) / "dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def moejax(*words: str) -> str:
        done = subprocess.run(
            [python, "-m", "moejax", *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert moejax("params", "olmoe-1b-7b", "--json").count('"total": 6919161856') == 1
    assert "fits" in moejax("plan", "configs/models/olmoe-1b-7b.yaml", "--target", "h200x8")
    assert "weight gather" in moejax("plan", "configs/quickstart.yaml")
