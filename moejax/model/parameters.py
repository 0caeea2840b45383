"""Abstract parameters: shape, logical dims and initial scale, before any memory is taken."""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

ZEROS = -1.0
"""Standard deviation that stands for a parameter that starts at zero."""


def weight(shape: tuple[int, ...], dims: tuple[str, ...], std: float) -> nnx.Param:
    """A parameter that starts normal with standard deviation `std`; at one where it is zero (scales), or at `ZEROS`."""
    assert len(shape) == len(dims), (shape, dims)
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), dims=dims, std=std)


class Abstract:
    """A module without values: what its parameters are, and the module again once there are weights."""

    def __init__(self, module: nnx.Module):
        self.graph, self.state = nnx.split(module)

    @property
    def shapes(self) -> dict[str, Any]:
        """Shape and type of every parameter."""
        return nnx.to_pure_dict(self.state)

    def metadata(self, name: str) -> dict[str, Any]:
        """One metadata field (`dims` or `std`) of every parameter."""
        is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
        fields = jax.tree.map(lambda p: p.get_metadata()[name], self.state, is_leaf=is_variable)
        return nnx.to_pure_dict(fields)

    def bind(self, weights: dict[str, Any]) -> Any:
        """The module with these weights."""
        state = jax.tree.map(lambda leaf: leaf, self.state)
        nnx.replace_by_pure_dict(state, weights)
        return nnx.merge(self.graph, state)


def initialize(seed: jax.Array, shapes: dict[str, Any], stds: dict[str, Any]) -> dict[str, Any]:
    """Initial float32 parameters. Each leaf's key comes from its name, so the mesh and the order do not matter."""

    def one(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct, std: float) -> jax.Array:
        if std <= 0:
            return jnp.full(shape.shape, 0.0 if std == ZEROS else 1.0, jnp.float32)
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
        return std * jax.random.normal(key, shape.shape, jnp.float32)

    return jax.tree_util.tree_map_with_path(one, shapes, stds)


def count(shapes: dict[str, Any]) -> int:
    """Number of parameters of a tree of shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
