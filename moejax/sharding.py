"""Mesh, sharding rules, and what follows from them.

A parameter has two layouts. *Storage*: float32 main weights and optimizer state, sharded as finely
as the rules allow. *Compute*: the weights that forward and backward read. One table of rules (logical
dim to mesh axes) gives both. Comparing the two gives the collectives: a leaf is gathered over the axes
that only storage has; its gradient is summed over all token axes that compute does not shard, and that
sum is scattered where storage is sharded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moejax.axes import AXES, CONTEXT, DATA, EXPERT, TOKEN_AXES
from moejax.config import MeshConfig, ShardingConfig
from moejax.errors import UserError
from moejax.varying import vary

COMPUTE_RULES: dict[str, tuple[str, ...]] = {"experts": (EXPERT,)}
"""Default axes that shard a dim of the compute weights."""

STORAGE_RULES: dict[str, tuple[str, ...]] = {
    "embed": (DATA, CONTEXT, EXPERT),
    "expert_embed": (DATA, CONTEXT),
}
"""Default further axes that shard a dim of the main weights and optimizer state."""

FLOAT32_DIMS = frozenset({"router", "norm"})
"""Leaves with one of these dims are never cast below float32."""


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Mesh over `devices` (default: all), row-major, outermost axis first."""
    devices = jax.devices() if devices is None else devices
    if len(devices) != config.size:
        raise UserError(
            f"the mesh {dict(zip(AXES, config.shape, strict=True))} needs {config.size} devices, but there are "
            f"{len(devices)}: change mesh.data or mesh.expert so that the product of the sizes is {len(devices)}"
        )
    return Mesh(np.asarray(devices).reshape(config.shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@dataclass(frozen=True)
class Layout:
    """Where one parameter lives.

    Attributes:
        shape: Global shape.
        dims: Logical name of each dim.
        compute: Mesh axes of each dim in compute layout.
        extra: Further mesh axes of each dim in storage layout.
        note: Why storage is not sharded as the rules say; empty if it is.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    compute: tuple[tuple[str, ...], ...]
    extra: tuple[tuple[str, ...], ...]
    note: str = ""

    @property
    def compute_spec(self) -> PartitionSpec:
        """Compute layout as a PartitionSpec."""
        return PartitionSpec(*(axes or None for axes in self.compute))

    @property
    def storage_spec(self) -> PartitionSpec:
        """Storage layout as a PartitionSpec; compute axes are the major ones."""
        return PartitionSpec(*((c + e) or None for c, e in zip(self.compute, self.extra, strict=True)))

    @property
    def sum_axes(self) -> tuple[str, ...]:
        """Token axes over which the gradient is summed without being scattered."""
        used = {axis for axes in self.compute + self.extra for axis in axes}
        return tuple(axis for axis in TOKEN_AXES if axis not in used)

    @property
    def storage_axes(self) -> tuple[str, ...]:
        """Mesh axes that shard storage."""
        return tuple(axis for c, e in zip(self.compute, self.extra, strict=True) for axis in c + e)

    def dtype(self, compute: jnp.dtype) -> jnp.dtype:
        """Type of the compute weight: `compute`, or float32 for routers and norms."""
        return jnp.dtype(jnp.float32) if FLOAT32_DIMS & set(self.dims) else jnp.dtype(compute)

    def without_layers(self) -> "Layout":
        """Layout of one layer's slice of a leaf that is stacked over layers."""
        return Layout(self.shape[1:], self.dims[1:], self.compute[1:], self.extra[1:], self.note)


def _rules(config: ShardingConfig) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    compute = {**COMPUTE_RULES, **config.compute}
    storage = {**STORAGE_RULES, **config.storage}
    if tuple(compute.get("experts", ())) != (EXPERT,):
        raise UserError(
            f"sharding.compute.experts={list(compute['experts'])}: must be [expert]; set mesh.expert=1 for none"
        )
    for dim, axes in compute.items():
        bad = set(axes) & (set(TOKEN_AXES) - ({EXPERT} if dim == "experts" else set()))
        if bad:
            raise UserError(
                f"sharding.compute.{dim}={list(axes)}: {', '.join(sorted(bad))} carries tokens, so compute weights "
                f"cannot be sharded over it; put it under sharding.storage"
            )
    return compute, storage


def _layout(
    name: str, shape: tuple[int, ...], dims: tuple[str, ...], mesh: MeshConfig, config: ShardingConfig
) -> Layout:
    compute_rules, storage_rules = _rules(config)
    compute = tuple(compute_rules.get(dim, ()) for dim in dims)
    extra = tuple(storage_rules.get(dim, ()) for dim in dims)
    used = [axis for axes in compute + extra for axis in axes]
    twice = sorted({axis for axis in used if used.count(axis) > 1})
    if twice:
        raise UserError(
            f"sharding rules use axis {twice[0]} twice on {name} (dims {', '.join(dims)}): "
            f"remove it from one of the rules under sharding.compute or sharding.storage"
        )
    for size, dim, axes in zip(shape, dims, compute, strict=True):
        if size % mesh.group(axes):
            raise UserError(
                f"{name}: {dim}={size} is not divisible by mesh axes {list(axes)} of size {mesh.group(axes)}"
            )
    note = ""
    if int(np.prod(shape)) < config.replicate_below:
        note = f"small: under {config.replicate_below} elements"
    else:
        for size, dim, c, e in zip(shape, dims, compute, extra, strict=True):
            if size % mesh.group(c + e):
                note = f"{dim}={size} is not divisible by {mesh.group(c + e)}"
    if note:
        extra = ((),) * len(dims)
    extra = tuple(tuple(axis for axis in axes if mesh.group([axis]) > 1) for axes in extra)
    return Layout(shape, dims, compute, extra, note)


def make_layouts(dims: Any, shapes: Any, mesh: MeshConfig, config: ShardingConfig) -> Any:
    """Tree of `Layout` for trees of dim names and shapes.

    Raises:
        UserError: for a rule that conflicts on a leaf, or a given rule that changes nothing.
    """
    paths = jax.tree_util.tree_leaves_with_path(dims, is_leaf=lambda x: isinstance(x, tuple))
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    leaves = [leaf for _, leaf in paths]
    flat_shapes = jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple))
    layouts = [_layout(n, s, d, mesh, config) for n, s, d in zip(names, flat_shapes, leaves, strict=True)]
    for column, rules, field in (("compute", config.compute, "compute"), ("storage", config.storage, "extra")):
        for dim, axes in rules.items():
            having = [layout for layout in layouts if dim in layout.dims]
            applied = any(getattr(layout, field)[layout.dims.index(dim)] for layout in having)
            if not having or (axes and mesh.group(axes) > 1 and not applied):
                why = "no parameter has this dim" if not having else "every such parameter is small or indivisible"
                raise UserError(f"sharding.{column}.{dim}={list(axes)} has no effect: {why}; remove the rule")
    treedef = jax.tree.structure(dims, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.unflatten(treedef, layouts)


def storage_shardings(layouts: Any, mesh: Mesh) -> Any:
    """Tree of NamedSharding for the storage layout."""
    return jax.tree.map(lambda layout: NamedSharding(mesh, layout.storage_spec), layouts, is_leaf=is_layout)


def is_layout(x: object) -> bool:
    """Whether `x` is a `Layout`: the leaf predicate of layout trees."""
    return isinstance(x, Layout)


def gather(tree: Mapping[str, Any], layouts: Mapping[str, Any], dtype: jnp.dtype) -> Any:
    """Storage shards to compute weights, inside `shard_map`: one all_gather per sharded dim of a leaf.

    The result varies over every token axis, so that its gradient stays local until `reduce`.
    """

    def one(layout: Layout, x: jax.Array) -> jax.Array:
        x = x.astype(layout.dtype(dtype))
        for dim, axes in enumerate(layout.extra):
            if axes:
                x = lax.all_gather(x, axes, axis=dim, tiled=True)
        return vary(x, TOKEN_AXES)

    with jax.named_scope("gather"):
        return jax.tree.map(one, layouts, tree, is_leaf=is_layout)


def reduce(grads: Mapping[str, Any], layouts: Mapping[str, Any]) -> Any:
    """Local gradients of compute weights to summed float32 storage shards: the adjoint of `gather`."""

    def one(layout: Layout, g: jax.Array) -> jax.Array:
        g = g.astype(jnp.float32)
        for dim, axes in enumerate(layout.extra):
            if axes:
                rest = g.shape[dim + 1 :]
                if "head_dim" in layout.dims[dim + 1 :]:  # XLA for TPU scatters [D, H x d], but all-reduces [D, H, d]
                    g = g.reshape(*g.shape[: dim + 1], -1)
                g = lax.psum_scatter(g, axes, scatter_dimension=dim, tiled=True)
                g = g.reshape(*g.shape[: dim + 1], *rest)
        return lax.psum(g, layout.sum_axes) if layout.sum_axes else g

    with jax.named_scope("reduce"):
        return jax.tree.map(one, layouts, grads, is_leaf=is_layout)


def gather_for(layouts: Any, dtype: jnp.dtype) -> Any:
    """`gather` as a function whose gradient is `reduce`, in float32 whatever the compute dtype."""

    @jax.custom_vjp
    def apply(tree: Any) -> Any:
        return gather(tree, layouts, dtype)

    apply.defvjp(lambda tree: (gather(tree, layouts, dtype), None), lambda _, grads: (reduce(grads, layouts),))
    return apply


def sum_of_squares(grads: Any, layouts: Any, mesh: MeshConfig) -> jax.Array:
    """This device's share of the squared global norm; the sum over all devices counts each parameter once."""

    def one(layout: Layout, g: jax.Array) -> jax.Array:
        replicas = mesh.size // mesh.group(layout.storage_axes)
        return vary(jnp.sum(jnp.square(g)) / replicas, AXES)

    return jax.tree.reduce(jnp.add, jax.tree.map(one, layouts, grads, is_leaf=is_layout))
