"""Checkpoints with Orbax: written in the background, complete or absent, free of mesh and gather mode.

On disk a checkpoint is CHECKPOINTS/STEP/ with `state` (a nested dict of arrays keyed by global names), `meta` (JSON:
step, tokens, data position, seed, configuration) and `files.json` (names and sizes of the files of both). Orbax
writes into a temporary folder and renames it at the end; `files.json` is written just before, so a folder that was
cut off, by us or by whoever copied it, is told from a whole one without reading the arrays.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import absl.logging
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from moejax.errors import UserError
from moejax.train.folder import disk_errors, write_whole
from moejax.train.guards import TrainingStopped
from moejax.train.state import TrainState, from_dict, named_leaves, to_dict

_FILES = "files.json"
_TEMPORARY = "*.orbax-checkpoint-tmp*"


class Checkpoints:
    """The checkpoints of one run. All processes make it and call it together.

    Args:
        folder: Where checkpoints lie.
        keep_last: Newest checkpoints kept when saving.
        keep_every: Also keep steps that are a multiple of this.
        read_only: Leave the folder as it is: for evaluation while a run trains.
    """

    def __init__(
        self, folder: Path, keep_last: int = 1, keep_every: int | None = None, read_only: bool = False
    ) -> None:
        self.folder = folder.absolute()
        self.set_aside: list[str] = []
        self._saving = -1
        absl.logging.set_verbosity(absl.logging.FATAL)  # Orbax logs tracebacks of errors that we report ourselves
        if not read_only:
            self._tidy()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep_last,
            keep_period=keep_every,
            create=not read_only,
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
        )
        handlers = {"state": ocp.PyTreeCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        with disk_errors(self.folder):
            self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def _tidy(self) -> None:
        """Remove what a killed run left half-written and set aside folders that are not whole."""
        if jax.process_index() == 0 and self.folder.is_dir():
            for path in self.folder.glob(_TEMPORARY):
                shutil.rmtree(path, ignore_errors=True)
            for path in self.folder.iterdir():
                if path.name.isdigit() and not _complete(path):
                    target = self.folder / f"incomplete-{path.name}"
                    shutil.rmtree(target, ignore_errors=True)
                    path.rename(target)
                    self.set_aside.append(path.name)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("checkpoints tidied")

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit() and _complete(path))

    def newest(self) -> int | None:
        """Return the step of the newest complete checkpoint, the same in every process; None without one."""
        newest = max(self.steps(), default=-1)
        if jax.process_count() > 1:
            newest = int(multihost_utils.broadcast_one_to_all(jnp.int32(newest)))
        return newest if newest >= 0 else None

    def save(self, state: TrainState, step: int, meta: dict[str, Any]) -> None:
        """Start to save in the background; arrays are copied before this returns, so `state` may be donated.

        Raises:
            TrainingStopped: The state holds a value that is not finite, which must not reach the disk.
            UserError: The disk is full, now or in the save before.
        """
        tree = state_dict(state)
        if not bool(_all_finite(tree)):
            raise TrainingStopped(f"step {step}: the state holds values that are not finite, so it is not saved")
        with disk_errors(self.folder):
            self._manager.wait_until_finished()
            self._saving = step
            args = ocp.args.Composite(state=ocp.args.PyTreeSave(tree), meta=ocp.args.JsonSave(meta))
            self._manager.save(step, args=args, force=True)

    def _seal(self) -> None:
        """List the files of the checkpoint being written; Orbax calls this just before it gives the folder its name."""
        if jax.process_index() != 0:
            return
        final = self.folder / str(self._saving)
        folder = next(self.folder.glob(f"{self._saving}.{_TEMPORARY.split('.', 1)[1]}"), final)
        files = [path for item in ("state", "meta") for path in (folder / item).rglob("*") if path.is_file()]
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)}
        write_whole(folder / _FILES, json.dumps(sizes))

    def meta(self, step: int) -> dict[str, Any]:
        """Return what was saved beside the state."""
        return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def differences(self, step: int, tree: dict[str, Any]) -> list[str]:
        """Return which tensors of `tree` (shapes, a nested dict) are saved otherwise, one text each."""
        metadata = self._manager.item_metadata(step)["state"]
        saved = {"/".join(names): tuple(leaf.shape) for names, leaf in named_leaves(dict(metadata.tree))}
        wanted = {"/".join(names): tuple(leaf.shape) for names, leaf in named_leaves(tree)}
        top = {name.split("/")[0] for name in wanted}
        out = []
        for name in sorted(n for n in saved.keys() | wanted.keys() if n.split("/")[0] in top):
            if saved.get(name) != wanted.get(name):
                have, want = (s if s is not None else "nothing" for s in (saved.get(name), wanted.get(name)))
                out.append(f"{name} (saved {have}, wanted {want})")
        return out

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """Restore a state with the shapes and shardings of `abstract`, whatever mesh it was saved on.

        Raises:
            UserError: The checkpoint holds other tensors, or is damaged.
        """
        return state_from_dict(self._restore(step, state_dict(abstract)), abstract)

    def restore_params(self, step: int, abstract_params: Any) -> Any:
        """Restore the parameters alone, with the shapes and shardings of `abstract_params`."""
        return from_dict(self._restore(step, {"params": abstract_params})["params"], abstract_params)

    def _restore(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        if differences := self.differences(step, abstract):
            raise UserError(
                f"{self.folder / str(step)}: the checkpoint does not fit this configuration: {_brief(differences)}: "
                "use the configuration that lies in the run's folder, or another run.name"
            )
        args = ocp.args.PyTreeRestore(
            item=abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract), partial_restore=True
        )
        try:
            return self._manager.restore(step, args=ocp.args.Composite(state=args))["state"]
        except Exception as error:
            reason = str(error).splitlines()[0][:200]
            raise UserError(
                f"{self.folder / str(step)}: the checkpoint is damaged ({reason}): delete this folder, and the same "
                "command goes on from the checkpoint before it"
            ) from error

    def check(self) -> None:
        """Raise what went wrong in the background, if anything did."""
        with disk_errors(self.folder):
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Wait until the save in progress is complete."""
        with disk_errors(self.folder):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and release what Orbax holds."""
        with disk_errors(self.folder):
            self._manager.close()


def _complete(folder: Path) -> bool:
    """Return whether every file that was listed when the checkpoint was written is there in full."""
    try:
        sizes = json.loads((folder / _FILES).read_text(encoding="utf-8"))
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in floats]))


def _brief(differences: list[str]) -> str:
    """Name every parameter; optimizer state mirrors them, so it is named only when no parameter differs."""
    params = [text for text in differences if text.startswith("params/")]
    rest = len(differences) - len(params)
    if not params:
        return ", ".join(differences)
    return ", ".join(params) + (f", and {rest} tensors of the optimizer" if rest else "")


def state_dict(state: TrainState) -> dict[str, Any]:
    """Return the state as the nested dict that checkpoints hold."""
    return {field: to_dict(value) if isinstance(value, dict | tuple) else value for field, value in _fields(state)}


def _fields(state: TrainState) -> list[tuple[str, Any]]:
    return list(state._asdict().items())


def state_from_dict(tree: dict[str, Any], like: TrainState) -> TrainState:
    """Return the inverse of `state_dict`, in the structure of `like`."""
    return TrainState(
        **{
            field: from_dict(tree[field], value) if isinstance(value, dict | tuple) else tree[field]
            for field, value in _fields(like)
        }
    )
