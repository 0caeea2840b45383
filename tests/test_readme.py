"""Every command and every Python example of README.md runs, one after the other in one folder, on a tiny model."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

MAKE_TARGETS = {"setup", "quickstart", "test", "lint", "format"}
"""Targets of the Makefile that README.md may name. .ci/run runs them all except format."""

SMALL = [
    "--model.d_model=16",
    "--model.mlp_dim=16",
    "--model.attention.head_dim=4",
    "--model.moe.expert_dim=8",
    "--data.sequence_length=32",
    "--eval.batches=1",
]
"""Appended to commands that take a configuration; the model of a run, once trained, is that of its folder."""

TAKE_CONFIG = ("train", "plan", "launch")


def blocks(text: str) -> list[tuple[str, str]]:
    """Return the code blocks of a Markdown text, fenced or indented, each with its language ("" if none is named)."""
    found: list[tuple[str, str]] = []
    for fenced in re.finditer(
        r"^```(\w*)\n(.*?)^```$|((?:^    [^\n]*\n|^\n(?=    ))+)", text, re.MULTILINE | re.DOTALL
    ):
        language, body, indented = fenced.groups()
        if indented is not None:
            body = re.sub(r"^    ", "", indented, flags=re.MULTILINE).strip("\n") + "\n"
            language = "python" if re.match(r"(from|import) ", body) else ""
        found.append((language, body))
    return found


def commands(text: str) -> list[str]:
    """Return the lines of the code blocks that start a command of this project, without comments and prompts."""
    lines = [line for language, body in blocks(text) if language != "python" for line in body.splitlines()]
    bare = [re.sub(r"\s+#.*$", "", line.removeprefix("$ ")).strip() for line in lines]
    return [line for line in bare if re.match(r"(\.venv/bin/)?moejax |make |python3? -m moejax ", line)]


COMMANDS = commands(README)
MAKE = [line for line in COMMANDS if line.startswith("make ")]
MOEJAX = [line for line in COMMANDS if not line.startswith("make ")]
PYTHON = [body for language, body in blocks(README) if language == "python"]


def test_blocks_and_commands_are_found() -> None:
    text = "A\n\n    make test   # all\n    moejax plan x.yaml\n\nB\n\n"
    text += "```bash\n$ moejax train c.yaml --a.b='c d'\nls\n```\n"
    text += "\n```python\nimport moejax\n```\n\n    from moejax import Trainer\n\n    Trainer\n\nC `moejax eval`\n"
    assert commands(text) == ["make test", "moejax plan x.yaml", "moejax train c.yaml --a.b='c d'"]
    python = [body for language, body in blocks(text) if language == "python"]
    assert python == ["import moejax\n", "from moejax import Trainer\n\nTrainer\n"]


def test_the_readme_shows_commands_and_python() -> None:
    assert COMMANDS[0] == "make quickstart"
    assert MOEJAX
    assert any("Trainer(" in body for body in PYTHON)


@pytest.mark.parametrize("line", MAKE)
def test_make_commands_exist(line: str) -> None:
    targets = shlex.split(line)[1:]
    assert set(targets) <= MAKE_TARGETS
    ci = (ROOT / ".ci" / "run").read_text()
    for target in targets:
        assert target == "format" or f"make {target}" in ci
    subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, check=True, capture_output=True)


def checkout(path: Path) -> Path:
    """Make `path` look like the checkout, for runs to be written into."""
    (path / "configs").symlink_to(ROOT / "configs")
    (path / "README.md").symlink_to(ROOT / "README.md")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all command lines: later ones use what earlier ones left."""
    return checkout(tmp_path_factory.mktemp("readme"))


def small(line: str) -> list[str]:
    """Return the words of a command line, with a model and a run that take seconds."""
    words = shlex.split(line)
    words = words[words.index("moejax") + 1 :] if "moejax" in words else words[1:]
    if words[0] in TAKE_CONFIG:
        words += SMALL
        if "train" in words:
            words += ["--train.steps=2", "--log.every=1"]
    return words


@pytest.mark.parametrize("line", MOEJAX)
def test_moejax_commands_run(line: str, folder: Path) -> None:
    run_python(["-m", "moejax", *small(line)], folder)


@pytest.mark.parametrize("body", PYTHON)
def test_python_examples_run(body: str, tmp_path: Path) -> None:
    run_python(["-c", body], checkout(tmp_path))


def run_python(arguments: list[str], folder: Path) -> None:
    """Run Python as a plain session would, without the settings of these tests."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
