"""Between storage and compute layout, inside `shard_map`: `gather`, and its adjoint `reduce`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax.axes import AXES, MODEL, STAGE
from moejax.config import MeshConfig
from moejax.ordering import after
from moejax.sharding.layout import Layout, is_layout
from moejax.varying import vary, varying_axes


def gather(tree: Mapping[str, Any], layouts: Mapping[str, Any], dtype: jnp.dtype) -> Any:
    """Storage shards to compute weights: one all_gather per sharded dim of a leaf, and to stages one all_to_all before.

    The result varies over every axis of other tokens, so that its gradient stays local until `reduce`.
    """

    def one(layout: Layout, x: jax.Array, turns: jax.Array) -> jax.Array:
        x = x.astype(layout.dtype(dtype))
        return vary(_to_stages(x, layout, turns) if layout.slots else _gather_dims(x, layout), layout.token_axes)

    with jax.named_scope("gather"):
        return _in_turn(one, layouts, tree)


def reduce(grads: Mapping[str, Any], layouts: Mapping[str, Any]) -> Any:
    """Local gradients of compute weights to summed float32 storage shards: the adjoint of `gather`."""

    def one(layout: Layout, g: jax.Array, turns: jax.Array) -> jax.Array:
        g = g.astype(jnp.float32)
        g = _from_stages(g, layout, turns) if layout.slots else _scatter_dims(g, layout)
        return lax.psum(g, layout.sum_axes) if layout.sum_axes else g

    with jax.named_scope("reduce"):
        return _in_turn(one, layouts, grads)


def _in_turn(one: Callable[[Layout, jax.Array, jax.Array], jax.Array], layouts: Any, tree: Any) -> Any:
    """`one` of each leaf: its layout, itself, and the numbers of its slots.

    Nothing else orders the loops, so each waits for what came before it (`moejax.ordering` says why). What varies over
    the model axis comes last: a number that varies there cannot hold back what does not.
    """
    kinds, structure = jax.tree.flatten(layouts, is_leaf=is_layout)
    leaves, found = structure.flatten_up_to(tree), {}
    done, looped = jnp.float32(0), False
    for place in sorted(range(len(leaves)), key=lambda i: (MODEL in varying_axes(leaves[i]), kinds[i].loops)):
        layout, leaf = kinds[place], leaves[place]
        turns = jnp.arange(len(layout.slots[0]) if layout.slots else 0)
        turns = after(done, turns) if layout.loops else turns
        found[place] = one(layout, after(done, leaf) if looped and not layout.loops else leaf, turns)
        done, looped = done + found[place].ravel()[0].astype(jnp.float32), looped or layout.loops
    return structure.unflatten([found[place] for place in range(len(leaves))])


def _gather_dims(x: jax.Array, layout: Layout) -> jax.Array:
    for dim, axes in enumerate(layout.gathered):
        if axes:
            x = lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


def _scatter_dims(g: jax.Array, layout: Layout) -> jax.Array:
    for dim, axes in enumerate(layout.gathered):
        if axes:
            rest = g.shape[dim + 1 :]
            if len(rest) > 1:  # XLA for TPU scatters [D, H x d], but all-reduces [D, H, d]
                g = g.reshape(*g.shape[: dim + 1], -1)
            g = lax.psum_scatter(g, axes, scatter_dimension=dim, tiled=True)
            g = g.reshape(*g.shape[: dim + 1], *rest)
    return g


def _to_stages(x: jax.Array, layout: Layout, turns: jax.Array) -> jax.Array:
    """Layers [L, ...] that every stage has a piece of, or all of, to the slots of this stage; empty ones are zero.

    A slot at a time: whole stacks of layers in the order of the slots would be copies as large as all weights.
    """
    table = np.asarray(layout.slots, np.int32)
    if layout.stage_dim is None:
        return _gather_dims(_take(x, jnp.asarray(table)[lax.axis_index(STAGE)]), layout)
    layer = layout.without_layers()

    def one(turn: jax.Array) -> jax.Array:
        pieces = _take(x, jnp.asarray(table)[:, turn])
        mine = lax.all_to_all(pieces, STAGE, split_axis=0, concat_axis=layout.stage_dim, tiled=True)
        return _gather_dims(mine[0], layer)

    return lax.map(one, turns)


def _from_stages(g: jax.Array, layout: Layout, turns: jax.Array) -> jax.Array:
    """The adjoint: to pieces of all layers [L, ...], or to this stage's share of a sum over stages."""
    table = np.asarray(layout.slots, np.int32)
    if layout.stage_dim is None:
        return place_layers(_scatter_dims(g, layout), layout.slots, layout.shape[0])
    layer, num_layers = layout.without_layers(), layout.shape[0]

    def one(total: jax.Array, slot: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        turn, g = slot
        return total.at[places[:, turn]].set(to_all(g), mode="drop"), None

    def to_all(g: jax.Array) -> jax.Array:
        pieces = _scatter_dims(g, layer)[None]
        return lax.all_to_all(pieces, STAGE, split_axis=layout.stage_dim, concat_axis=0, tiled=True)

    kind = jax.eval_shape(to_all, g[0])
    total = vary(jnp.zeros((num_layers, *kind.shape[1:]), kind.dtype), varying_axes(kind, turns))
    places = jnp.asarray(np.where(table < 0, num_layers, table))
    return lax.scan(one, total, (turns, g))[0]


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of the first dim, zero for -1."""
    taken = jnp.take(x, jnp.maximum(index, 0), axis=0)
    live = (index >= 0).reshape(-1, *([1] * (x.ndim - 1)))
    return jnp.where(live, taken, jnp.zeros_like(taken))


def place_layers(x: jax.Array, slots: tuple[tuple[int, ...], ...], num_layers: int) -> jax.Array:
    """This stage's slots [slots, ...] at the places of their layers [L, ...], zero elsewhere: a share of a sum."""
    mine = jnp.asarray(np.asarray(slots, np.int32))[lax.axis_index(STAGE)]
    mine = jnp.where(mine >= 0, mine, num_layers)
    empty = vary(jnp.zeros((num_layers, *x.shape[1:]), x.dtype), varying_axes(mine, x))
    return empty.at[mine].set(x, mode="drop")


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
