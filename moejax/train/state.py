"""The state of training, and its form on disk: a nested dict keyed by global names."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, KeyPath, SequenceKey

_WRAPPERS = ("inner_state", "inner_states")
"""Fields of optax's wrappers; left out of names, so that names say what is stored and not how it was composed."""


class TrainState(NamedTuple):
    """Everything that a step changes.

    Args:
        step: Steps taken, counted or skipped; int32 scalar.
        params: Main weights in float32, a nested dict in storage layout.
        opt_state: State of the optimizer; its leaves have the shape of a parameter or are small.
        skipped: Steps that changed nothing because loss or gradient was not finite; int32 scalar.
        bad_streak: How many of the latest steps in a row were skipped; int32 scalar.
    """

    step: Any
    params: Any
    opt_state: Any
    skipped: Any
    bad_streak: Any


def _name(key: Any) -> str:
    match key:
        case DictKey() | FlattenedIndexKey():
            return str(key.key)
        case GetAttrKey():
            return key.name
        case SequenceKey():
            return str(key.idx)
    raise TypeError(f"unknown key {key!r} in the state")


def path_names(path: KeyPath) -> tuple[str, ...]:
    """Return a key path as names, without the fields of optax's wrappers."""
    return tuple(name for name in map(_name, path) if name not in _WRAPPERS)


def named_leaves(tree: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield `(names, leaf)` for every leaf of a pytree."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield path_names(path), leaf


def to_dict(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree as a nested dict; whatever classes the pytree is made of, they leave no trace."""
    out: dict[str, Any] = {}
    for names, leaf in named_leaves(tree):
        node = out
        for name in names[:-1]:
            node = node.setdefault(name, {})
        if names[-1] in node:
            raise ValueError(f"two leaves are named {'/'.join(names)}")
        node[names[-1]] = leaf
    return out


def from_dict(values: dict[str, Any], like: Any) -> Any:
    """Return a pytree of the structure of `like` with the leaves of `values`, a dict as `to_dict` makes it."""

    def pick(path: KeyPath, _: Any) -> Any:
        node: Any = values
        for name in path_names(path):
            node = node[name]
        return node

    return jax.tree_util.tree_map_with_path(pick, like)


def map_like_params(state: Any, params: Any, per_param: Any, other: Callable[[Any], Any]) -> Any:
    """Map optimizer state: leaves that belong to a parameter get its entry of `per_param`, the rest `other(leaf)`.

    A leaf belongs to the parameter whose name ends its own name and whose shape it has.
    """
    entries = dict(named_leaves(per_param))
    known = {names: (leaf.shape, entries[names]) for names, leaf in named_leaves(params)}

    def one(path: KeyPath, leaf: Any) -> Any:
        names = path_names(path)
        for start in range(len(names)):
            shape, entry = known.get(names[start:], (None, None))
            if shape == leaf.shape:
                return entry
        return other(leaf)

    return jax.tree_util.tree_map_with_path(one, state)
