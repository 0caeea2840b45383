"""The table of sharding rules, and the layouts that it gives each parameter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moejax.axes import AXES, CONTEXT, DATA, EXPERT, MODEL, STAGE, TOKEN_AXES
from moejax.config import Config, MeshConfig
from moejax.errors import UserError
from moejax.stages import plan_stages

COMPUTE_RULES: dict[str, tuple[str, ...]] = {
    "vocab": (STAGE, MODEL),
    "heads": (MODEL,),
    "kv_heads": (MODEL,),
    "mlp": (MODEL,),
    "expert_mlp": (MODEL,),
}
"""Default axes that shard a dim of the compute weights; `experts` are on `moe.expert_axes`, layers on their stage."""

STORAGE_RULES: dict[str, tuple[str, ...]] = {
    "embed": (DATA, CONTEXT, EXPERT, STAGE),
    "expert_embed": (DATA, CONTEXT, STAGE),
}
"""Default further axes that shard a dim of the main weights and optimizer state, where the leaf does not use them yet.
The stage is the innermost: what an all_to_all between stages moves then lies side by side."""

FLOAT32_DIMS = frozenset({"router", "norm"})
"""Leaves with one of these dims are never cast below float32."""

Rules = dict[str, tuple[str, ...]]


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
        slots: Of a leaf that is stacked over layers and runs on pipeline stages: [stage][slot] to layer, -1 for an
            empty slot. Compute weights then are those of this stage's slots, [slots, ...].
        shared: Whether all pipeline stages have it whole and use it for other tokens: then the stage is one of the axes
            that storage is gathered over, and that gradients are summed over.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    compute: tuple[tuple[str, ...], ...]
    extra: tuple[tuple[str, ...], ...]
    note: str = ""
    slots: tuple[tuple[int, ...], ...] = ()
    shared: bool = False

    @property
    def compute_spec(self) -> PartitionSpec:
        """Compute layout as a PartitionSpec, of one stage."""
        return PartitionSpec(*(axes or None for axes in self.compute))

    @property
    def storage_spec(self) -> PartitionSpec:
        """Storage layout as a PartitionSpec; compute axes are the major ones."""
        return PartitionSpec(*((c + e) or None for c, e in zip(self.compute, self.extra, strict=True)))

    @property
    def gathered(self) -> tuple[tuple[str, ...], ...]:
        """Axes of each dim over which storage is gathered: the extra ones, but not the stage of layers."""
        return tuple(tuple(axis for axis in axes if axis != STAGE or self.shared) for axes in self.extra)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes along which different tokens use the compute weights."""
        return (*TOKEN_AXES, STAGE) if self.slots or self.shared else TOKEN_AXES

    @property
    def loops(self) -> bool:
        """Whether its layers go to their stages in several turns, one slot at a time."""
        return bool(self.slots) and self.stage_dim is not None and len(self.slots[0]) > 1

    @property
    def stage_dim(self) -> int | None:
        """The dim that storage shards over the stage; None if none."""
        return next((dim for dim, axes in enumerate(self.extra) if STAGE in axes), None)

    @property
    def sum_axes(self) -> tuple[str, ...]:
        """Axes over which the gradient is summed without being scattered."""
        used = {axis for axes in self.compute + self.extra for axis in axes}
        return tuple(axis for axis in self.token_axes if axis not in used)

    @property
    def storage_axes(self) -> tuple[str, ...]:
        """Mesh axes that shard storage."""
        return tuple(axis for c, e in zip(self.compute, self.extra, strict=True) for axis in c + e)

    def dtype(self, compute: jnp.dtype) -> jnp.dtype:
        """Type of the compute weight: `compute`, or float32 for routers and norms."""
        return jnp.dtype(jnp.float32) if FLOAT32_DIMS & set(self.dims) else jnp.dtype(compute)

    def without_layers(self) -> "Layout":
        """Layout of one layer's slice of a leaf that is stacked over layers."""
        return Layout(self.shape[1:], self.dims[1:], self.compute[1:], self.extra[1:], self.note, shared=self.shared)


def _rules(config: Config) -> tuple[Rules, Rules]:
    expert_axes = config.moe.expert_axes
    compute = {**COMPUTE_RULES, "experts": expert_axes, **config.sharding.compute}
    storage = {**STORAGE_RULES, **config.sharding.storage}
    if tuple(compute["experts"]) != expert_axes:
        raise UserError(
            f"sharding.compute.experts={list(compute['experts'])}: must be {list(expert_axes)}; set moe.expert_axes, "
            f"or mesh.expert=1 for none"
        )
    for dim, axes in compute.items():
        bad = set(axes) & (set(TOKEN_AXES) - (set(expert_axes) if dim == "experts" else set()))
        if bad:
            raise UserError(
                f"sharding.compute.{dim}={list(axes)}: {', '.join(sorted(bad))} carries tokens, so compute weights "
                f"cannot be sharded over it; put it under sharding.storage"
            )
        if STAGE in axes and dim != "vocab":
            raise UserError(f"sharding.compute.{dim}={list(axes)}: stage can shard vocab alone; layers are on stages")
        if MODEL in axes and dim not in COMPUTE_RULES:
            dims = ", ".join(COMPUTE_RULES)
            raise UserError(f"sharding.compute.{dim}={list(axes)}: model can shard {dims}; no layer sums over {dim}")
    for dim, axes in storage.items():
        if MODEL in axes:
            raise UserError(f"sharding.storage.{dim}={list(axes)}: model shards compute weights; leave it out here")
    return compute, storage


def compute_axes(config: Config, dim: str) -> tuple[str, ...]:
    """Mesh axes of more than one device that shard a dim of the compute weights: what a sum over the dim runs over."""
    axes = _rules(config)[0].get(dim, ())
    return tuple(axis for axis in axes if config.mesh.group([axis]) > 1)


def _storage_axes(config: Config, rules: Rules, dim: str, used: set[str], stacked: bool) -> tuple[str, ...]:
    """Extra axes of a dim, the stage (of stacked leaves alone) last. A default rule gives way to what the leaf has."""
    axes = [axis for axis in rules.get(dim, ()) if config.mesh.group([axis]) > 1 and (stacked or axis != STAGE)]
    if dim not in config.sharding.storage:
        axes = [axis for axis in axes if axis not in used]
    return tuple(sorted(axes, key=lambda axis: axis == STAGE))


def _layout(
    name: str, shape: tuple[int, ...], dims: tuple[str, ...], config: Config, slots: tuple[tuple[int, ...], ...]
) -> Layout:
    mesh, stacked = config.mesh, dims[0] == "layers"
    compute_rules, storage_rules = _rules(config)
    compute = tuple(tuple(axis for axis in compute_rules.get(dim, ()) if mesh.group([axis]) > 1) for dim in dims)
    taken = {axis for axes in compute for axis in axes}
    extra = tuple(_storage_axes(config, storage_rules, dim, taken, stacked) for dim in dims)
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
                f"{name}: {dim}={size} is not divisible by mesh axes {list(axes)} of size {mesh.group(axes)}: change "
                f"it, or set sharding.compute.{dim}=[] to keep the dim whole"
            )
    note = ""
    if int(np.prod(shape)) < config.sharding.replicate_below:
        note = f"small: under {config.sharding.replicate_below} elements"
    else:
        for size, dim, c, e in zip(shape, dims, compute, extra, strict=True):
            if size % mesh.group(c + e):
                note = f"{dim}={size} is not divisible by {mesh.group(c + e)}"
    if note:
        extra = ((),) * len(dims)
    shared = mesh.stage > 1 and stacked and not slots
    return Layout(shape, dims, compute, extra, note, slots if stacked else (), shared)


def make_layouts(dims: Any, shapes: Any, config: Config) -> Any:
    """Tree of `Layout` for trees of dim names and shapes, whose top-level keys are those of the decoder's parameters.

    Raises:
        UserError: for a rule that conflicts on a leaf, or a given rule that changes nothing.
    """
    paths = jax.tree_util.tree_leaves_with_path(dims, is_leaf=lambda x: isinstance(x, tuple))
    flat_shapes = jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple))
    placed = plan_stages(config).slots if config.mesh.stage > 1 else ()
    slots = {f"groups_{g}": table for g, table in enumerate(placed)}
    layouts = []
    for (path, leaf), shape in zip(paths, flat_shapes, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        layouts.append(_layout(name, shape, leaf, config, slots.get(name.partition(".")[0], ())))
    _check_effect(layouts, config)
    treedef = jax.tree.structure(dims, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.unflatten(treedef, layouts)


def _check_effect(layouts: Sequence[Layout], config: Config) -> None:
    mesh, given = config.mesh, config.sharding
    for column, rules, field in (("compute", given.compute, "compute"), ("storage", given.storage, "extra")):
        for dim, axes in rules.items():
            having = [layout for layout in layouts if dim in layout.dims]
            applied = any(getattr(layout, field)[layout.dims.index(dim)] for layout in having)
            if not having or (axes and mesh.group(axes) > 1 and not applied):
                why = "no parameter has this dim" if not having else "every such parameter is small or indivisible"
                raise UserError(f"sharding.{column}.{dim}={list(axes)} has no effect: {why}; remove the rule")


def storage_shardings(layouts: Any, mesh: Mesh) -> Any:
    """Tree of NamedSharding for the storage layout."""
    return jax.tree.map(lambda layout: NamedSharding(mesh, layout.storage_spec), layouts, is_leaf=is_layout)


def is_layout(x: object) -> bool:
    """Whether `x` is a `Layout`: the leaf predicate of layout trees."""
    return isinstance(x, Layout)
