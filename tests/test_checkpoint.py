"""Checkpoints: what they hold, on which mesh they come back, and which are refused."""

import contextlib
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from train_toy import toy_config, toy_program

from moejax.errors import UserError
from moejax.train.checkpoint import Checkpoints
from moejax.train.state import named_leaves, to_dict

META = {"step": 3, "tokens": 5}


def random_state(config, seed=1):
    """A state whose every leaf is random, on the mesh of the configuration."""
    program = toy_program(config)
    rng = np.random.default_rng(seed)

    def fill(leaf):
        values = (
            rng.integers(1, 9, leaf.shape)
            if jnp.issubdtype(leaf.dtype, jnp.integer)
            else rng.standard_normal(leaf.shape)
        )
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return program, jax.tree.map(fill, program.abstract_state)


def save_steps(folder, state, steps, **options):
    checkpoints = Checkpoints(folder, **{"keep_last": 9, **options})
    for step in steps:
        checkpoints.save(state._replace(step=jnp.int32(step)), step, META | {"step": step})
    checkpoints.close()


@contextlib.contextmanager
def opened(folder, **options):
    with contextlib.closing(Checkpoints(folder, **options)) as checkpoints:
        yield checkpoints


def whole_steps(folder):
    with opened(folder, read_only=True) as checkpoints:
        return checkpoints.steps()


def _equal(a, b):
    for (names, x), (_, y) in zip(named_leaves(a), named_leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(names))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 3 and 6, never changed: tests copy them."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    program, state = random_state(toy_config(folder.parent))
    save_steps(folder, state, [3, 6])
    return folder, program, state


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "checkpoints"), saved[1], saved[2]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("mesh", [(8, 1), (1, 8), (1, 1)])
def test_restores_on_another_mesh(tmp_path, optimizer, mesh):
    options = [f"optimizer.name={optimizer}", "model.moe.num_experts=8"]
    _, state = random_state(toy_config(tmp_path, *options))
    save_steps(tmp_path / "c", state, [3])
    program, _ = random_state(toy_config(tmp_path, *options, f"mesh.data={mesh[0]}", f"mesh.expert={mesh[1]}"))
    with opened(tmp_path / "c", read_only=True) as checkpoints:
        restored = checkpoints.restore(3, program.abstract_state)
    _equal(restored, state._replace(step=jnp.int32(3)))
    jax.tree.map(lambda got, want: _same_sharding(got, want), restored, program.abstract_state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)


def _same_sharding(got, want):
    assert got.sharding.is_equivalent_to(want.sharding, got.ndim), (got.sharding, want.sharding)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_format_is_a_nested_dict_of_global_names(saved):
    """Read by Orbax with no knowledge of the project: no class of Optax or of ours is needed."""
    folder, _, state = saved
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(folder / "6/state")
    names = {"/".join(names) for names, _ in named_leaves(tree)}
    assert {
        "params/groups_0/experts",
        "opt_state/moments/nu/groups_0/experts",
        "step",
        "skipped",
        "bad_streak",
    } <= names
    assert all(isinstance(node, dict) for node in _nodes(tree))
    np.testing.assert_array_equal(tree["params"]["groups_0"]["experts"], state.params["groups_0"]["experts"])
    assert len(names) == len(jax.tree.leaves(state))


def _nodes(tree):
    yield tree
    for child in tree.values():
        if not isinstance(child, np.ndarray | np.generic | jax.Array):
            yield from _nodes(child)


def test_meta_and_params_alone(saved):
    folder, program, state = saved
    with opened(folder, read_only=True) as checkpoints:
        assert checkpoints.newest() == 6
        assert checkpoints.meta(3) == META
        _equal(checkpoints.restore_params(6, program.abstract_state.params), state.params)


def test_keeps_the_last_and_every_so_many(tmp_path):
    _, state = random_state(toy_config(tmp_path))
    save_steps(tmp_path / "c", state, range(2, 17, 2), keep_last=2, keep_every=6)
    assert whole_steps(tmp_path / "c") == [6, 12, 14, 16]


def _truncate(folder):
    file = max((folder / "6/state").rglob("d/*"), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)


def _remove_file(folder):
    max((folder / "6/state").rglob("d/*"), key=lambda path: path.stat().st_size).unlink()


def _remove_list(folder):
    (folder / "6/files.json").unlink()


def _garble_list(folder):
    (folder / "6/files.json").write_text('{"state')


def _empty(folder):
    shutil.rmtree(folder / "6")
    (folder / "6").mkdir()


def _file_instead(folder):
    shutil.rmtree(folder / "6")
    (folder / "6").write_bytes(b"\0garbage")


def _temporary(folder):
    (folder / "6").rename(folder / "6.orbax-checkpoint-tmp-17")


@pytest.mark.parametrize(
    "damage", [_truncate, _remove_file, _remove_list, _garble_list, _empty, _file_instead, _temporary]
)
def test_incomplete_checkpoint_is_never_taken(copied, damage):
    folder, program, state = copied
    damage(folder)
    (folder / "notes.txt").write_text("garbage")
    assert whole_steps(folder) == [3]
    with opened(folder, keep_last=9) as checkpoints:
        assert checkpoints.newest() == 3
        assert checkpoints.set_aside == ([] if damage is _temporary else ["6"])
        _equal(checkpoints.restore(3, program.abstract_state), state._replace(step=jnp.int32(3)))
        checkpoints.save(state, 6, META)  # the name is free again
    assert whole_steps(folder) == [3, 6]
    assert not list(folder.glob("*tmp*"))


def test_reading_alone_changes_nothing(copied):
    folder, _, _ = copied
    _truncate(folder)
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    assert whole_steps(folder) == [3]
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before


def test_other_shapes_are_named(saved):
    folder, _, _ = saved
    other = toy_program(toy_config(folder.parent, "model.d_model=24"))
    with opened(folder, read_only=True) as checkpoints, pytest.raises(UserError) as refusal:
        checkpoints.restore(6, other.abstract_state)
    text = str(refusal.value)
    assert "params/embed/table (saved (264, 16), wanted (264, 24))" in text
    assert "params/groups_0/experts (saved (2, 4, 16, 8), wanted (2, 4, 24, 8))" in text
    assert "params/groups_0/norm (saved (2, 16), wanted (2, 24))" in text
    assert "params/head/kernel (saved (16, 264), wanted (24, 264))" in text
    assert "and 8 tensors of the optimizer" in text
    assert "\n" not in text


def test_missing_and_unknown_tensors_are_named(saved):
    folder, program, _ = saved
    params = dict(program.abstract_state.params)
    params["groups_1"] = {"bias": params["groups_0"]["norm"]}
    del params["head"]
    with opened(folder, read_only=True) as checkpoints, pytest.raises(UserError) as refusal:
        checkpoints.restore_params(6, params)
    assert "params/groups_1/bias (saved nothing, wanted (2, 16))" in str(refusal.value)
    assert "params/head/kernel (saved (16, 264), wanted nothing)" in str(refusal.value)


def test_to_dict_refuses_two_leaves_of_one_name():
    with pytest.raises(ValueError, match="two leaves"):
        to_dict({"a": 1, "inner_state": {"a": 2}})
