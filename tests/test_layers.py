"""The layers of the package: imports go downwards only, and files and functions stay small."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "moejax"

LAYERS = [
    ["errors", "files", "axes", "config", "stages", "options", "configure"],
    ["varying", "ordering", "sharding"],
    ["kernels"],
    ["nn"],
    ["moe"],
    ["model"],
    ["schedule"],
    ["train"],
    ["data"],
    ["hf"],
    ["plan"],
    ["cli"],
]
"""Lowest first; within a layer, left to right. train/ reads data/, which itself may use the first layer alone."""

POSITION = {name: (row, column) for row, names in enumerate(LAYERS) for column, name in enumerate(names)}
UPWARDS = {("train", "data")}
ONLY_IN = {"flax": "model", "grain": "data", "jsonargparse": "configure"}
STANDARD_LIBRARY_ONLY = {"errors", "files", "axes", "config", "stages", "options"}
NO_JAX = {"errors", "files", "axes", "config", "stages", "options", "configure", "data"}
ABOVE_ALL = {"__init__", "__main__"}
MAX_LINES = 250
MAX_FUNCTION_LINES = 60

FILES = sorted(PACKAGE.rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a file imports, wherever in it, and those that only a type checker reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(part: str, names: Iterator[str]) -> list[str]:
    """Return what `names`, imported by a file of the layer `part`, break."""
    found: list[str] = []
    for name in names:
        top, _, inner = name.partition(".")
        if top == "moejax":
            other = inner.partition(".")[0]
            if other in {"", "__version__"}:
                continue
            if other not in POSITION:
                found.append(f"{name}: in no layer")
            elif POSITION[other] > POSITION[part] and (part, other) not in UPWARDS:
                found.append(f"{name}: {part} must not import {other}")
            elif part == "data" and other != "data" and POSITION[other][0] > 0:
                found.append(f"{name}: data must import the first layer alone")
        elif top in ONLY_IN and part != ONLY_IN[top]:
            found.append(f"{name}: only {ONLY_IN[top]} may import {top}")
        elif part in STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names:
            found.append(f"{name}: {part} imports the standard library only")
        elif part in NO_JAX and top in {"jax", "jaxlib", "optax", "orbax", "chex", "flax"}:
            found.append(f"{name}: {part} imports no JAX")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_file_keeps_its_layer_and_size(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part not in ABOVE_ALL:
        assert part in POSITION, f"{part} is in no layer: add it to LAYERS and to DESIGN.md"
        assert violations(part, imports(tree)) == []
    num_lines = len(text.splitlines())
    assert num_lines <= MAX_LINES
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("kernels", "from moejax.moe.layer import moe_layer"),
        ("config", "from moejax.configure import load_config"),
        ("moe", "import flax"),
        ("model", "import grain.python"),
        ("config", "import yaml"),
        ("data", "import jax.numpy"),
        ("data", "from moejax.train.state import TrainState"),
        ("data", "from moejax import sharding"),
        ("plan", "from moejax.cli import main"),
        ("nn", "from moejax.utils import helper"),
    ],
)
def test_a_violation_is_found(part: str, line: str) -> None:
    assert len(violations(part, imports(ast.parse(line)))) == 1


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("train", "from moejax.data.loader import Loader"),
        ("model", "from flax import nnx"),
        ("data", "import grain, numpy"),
        ("cli", "from moejax.train.trainer import Trainer"),
    ],
)
def test_an_allowed_import_passes(part: str, line: str) -> None:
    assert violations(part, imports(ast.parse(line))) == []
