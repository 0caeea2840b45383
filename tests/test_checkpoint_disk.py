"""Checkpoints when the disk is full or the state is not finite, and what a run writes beside its state."""

import errno
import itertools
import json
import os

import jax
import jax.numpy as jnp
import pytest
from test_checkpoint import META, opened, random_state, save_steps, whole_steps
from train_toy import toy_config, toy_trainer

from moejax.errors import UserError
from moejax.train.checkpoint import Checkpoints
from moejax.train.guards import TrainingStopped


@pytest.mark.parametrize("place", ["params", "opt_state"])
def test_state_that_is_not_finite_is_not_saved(tmp_path, place):
    _, state = random_state(toy_config(tmp_path))
    leaves, treedef = jax.tree.flatten(getattr(state, place))
    index = next(i for i, leaf in enumerate(leaves) if leaf.ndim > 1)
    leaves[index] = leaves[index].at[0, 0].set(jnp.nan)
    with opened(tmp_path / "c") as checkpoints, pytest.raises(TrainingStopped, match="not finite"):
        checkpoints.save(state._replace(**{place: treedef.unflatten(leaves)}), 3, META)
    assert whole_steps(tmp_path / "c") == []


def test_full_disk_while_sealing_in_the_background(tmp_path, monkeypatch):
    """The error is raised in Orbax's thread; it reaches the loop as one line, and the checkpoint does not count."""
    _, state = random_state(toy_config(tmp_path))
    save_steps(tmp_path / "c", state, [3])
    monkeypatch.setattr(os, "fsync", _no_space)
    checkpoints = Checkpoints(tmp_path / "c", keep_last=9)
    checkpoints.save(state, 6, META)
    with pytest.raises(UserError, match="no space left on the disk"):
        checkpoints.wait()
    monkeypatch.undo()
    checkpoints.close()
    assert whole_steps(tmp_path / "c") == [3]


def _no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_as_orbax_words_it(tmp_path, monkeypatch):
    _, state = random_state(toy_config(tmp_path))
    checkpoints = Checkpoints(tmp_path / "c")

    def full(*_, **__):
        raise ValueError("Error writing 'params': [errno=28: No space left on device]")

    monkeypatch.setattr(checkpoints._manager, "save", full)
    with pytest.raises(UserError, match="set run.root to another disk"):
        checkpoints.save(state, 3, META)
    monkeypatch.undo()
    checkpoints.close()


def test_full_disk_ends_a_run_and_a_later_one_goes_on(tmp_path, monkeypatch):
    want = toy_trainer(toy_config(tmp_path / "whole")).run()
    calls = itertools.count()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: _no_space() if next(calls) > 4 else fsync(fd))
    with pytest.raises(UserError, match="no space left"):
        toy_trainer(toy_config(tmp_path / "full")).run()
    monkeypatch.undo()
    rows = toy_trainer(toy_config(tmp_path / "full")).run()
    assert [row["loss"] for row in rows] == [row["loss"] for row in want]


def test_checkpoint_of_a_run_names_the_position_in_the_data(tmp_path):
    toy_trainer(toy_config(tmp_path)).run()
    with opened(tmp_path / "toy/checkpoints", read_only=True) as checkpoints:
        meta = checkpoints.meta(12)
    assert meta["step"] == 12
    assert meta["data"] == {"fingerprint": "toy stdlib train", "seed": 0, "batch_size": 8, "sequence_length": 8}
    assert meta["config"]["model"]["d_model"] == 16
    json.dumps(meta)
