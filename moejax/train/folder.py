"""The folder of a run: what lies in it, files that are whole or absent, and errors of full disks."""

import contextlib
import errno
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

import moejax
from moejax.config import Config
from moejax.configure import dump_config
from moejax.errors import UserError
from moejax.files import replacing

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_SAME_SHAPES = ("model.dtype", "model.init_std")
"""Options of the model that may change between sessions of one run."""


class RunFolder:
    """Paths inside ROOT/NAME/.

    Args:
        config: Uses `run.root` and `run.name`.
    """

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.root, config.run.name)
        self.config = self.path / "config.yaml"
        self.versions = self.path / "versions.json"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.profile = self.path / "profile"

    def make(self) -> None:
        """Make the folder.

        Raises:
            UserError: It cannot be made: a file is in the way, or it may not be written to.
        """
        with disk_errors(self.path):
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise UserError(f"{self.path}: a file lies where the run's folder should be: set run.root") from None

    def write(self, config: Config) -> None:
        """Write the resolved configuration and the versions of what runs it."""
        write_whole(self.config, dump_config(config))
        write_whole(self.versions, json.dumps(_versions(), indent=2) + "\n")


def _versions() -> dict[str, Any]:
    versions: dict[str, Any] = {"moejax": moejax.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    versions["devices"] = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    versions["processes"] = jax.process_count()
    return versions


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old content or the new one, never a part.

    Raises:
        UserError: The disk is full or the folder cannot be written to.
    """
    with disk_errors(path), replacing(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of a full or protected disk into `UserError`; they reach us as OSError, or as text from Orbax."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else None
        if code in (errno.ENOSPC, errno.EDQUOT) or any(text in str(error) for text in ("No space left", "ENOSPC")):
            raise UserError(
                f"{path}: no space left on the disk: free some or set run.root to another disk; "
                "the same command goes on from the newest complete checkpoint"
            ) from error
        if code in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(
                f"{path}: cannot be written ({os.strerror(code)}): set run.root to your own folder"
            ) from error
        raise


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested dicts and lists as one dict with dotted keys, as in `model.layers.0.repeat`."""
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list | tuple):
        items = list(enumerate(tree))
    else:
        return {prefix: tree}
    return {k: v for key, value in items for k, v in flat(value, f"{prefix}.{key}" if prefix else str(key)).items()}


def model_changes(saved: dict[str, Any], config: Config) -> list[str]:
    """Return the options of the model that differ from a saved configuration, as `key: saved -> now`."""
    old, new = flat(saved.get("model", {}), "model"), flat(asdict(config.model), "model")
    keys = [key for key in sorted(old.keys() | new.keys()) if key not in _SAME_SHAPES]
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys if old.get(key) != new.get(key)]
