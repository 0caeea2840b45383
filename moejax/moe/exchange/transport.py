"""all_to_all and ragged_all_to_all with their adjoints; on CPU, which has no ragged one, the same by an all_gather."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels.table import chips
from moejax.moe.admission import starts
from moejax.moe.exchange.payload import Wire, carry, carry_gradients, encode, join
from moejax.varying import vary, varying_axes


class Updates(NamedTuple):
    """What one rank sends and receives; each [ranks * g], update i of peer p at p * g + i.

    Attributes:
        input: Where the rows to send start in this rank's send buffer.
        send: Rows to send.
        output: Where they start in the receive buffer of the peer.
        receive: Rows that come from the peer.
        home: Where those start in the peer's send buffer: with `land`, what the way back needs.
        land: Where those start in this rank's receive buffer.
    """

    input: jax.Array
    send: jax.Array
    output: jax.Array
    receive: jax.Array
    home: jax.Array
    land: jax.Array

    @classmethod
    def make(cls, sizes_SPg: jax.Array, me: jax.Array) -> "Updates":
        """From the rows of every source, peer and update; buffers are ordered (peer, update) and (update, source)."""
        sources, peers, parts = sizes_SPg.shape
        input_SPg = starts(sizes_SPg.reshape(sources, -1)).reshape(sizes_SPg.shape)
        by_peer = sizes_SPg.transpose(1, 2, 0).reshape(peers, -1)
        output_SPg = starts(by_peer).reshape(peers, parts, sources).transpose(2, 0, 1)
        sends = (a[me].reshape(-1) for a in (input_SPg, sizes_SPg, output_SPg))
        receives = (a[:, me].reshape(-1) for a in (sizes_SPg, input_SPg, output_SPg))
        return cls(*sends, *receives)

    def reverse(self) -> "Updates":
        """The way back: what was received is sent to where it came from."""
        return Updates(self.land, self.receive, self.home, self.send, self.output, self.input)


def swap(arrays: tuple[jax.Array, ...], axes: tuple[str, ...], ranks: int, wire: Wire = None) -> tuple[jax.Array, ...]:
    """Static all_to_all of [ranks * slots, ...] arrays, which cross together. It is its own transpose.

    With `wire` the first arrays are rounded on their way; gradients go back as they are.
    """
    return _swap(vary(arrays, varying_axes(arrays) | set(axes)), axes, ranks, wire)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _swap(arrays: tuple[jax.Array, ...], axes: tuple[str, ...], ranks: int, wire: Wire) -> tuple[jax.Array, ...]:
    return carry(arrays, partial(_all_to_all, axes=axes, ranks=ranks), wire)


def _all_to_all(payload: jax.Array, axes: tuple[str, ...], ranks: int) -> jax.Array:
    rows = payload.reshape(ranks, -1, *payload.shape[1:])
    return lax.all_to_all(rows, axes, 0, 0).reshape(payload.shape)


def _swap_backward(axes: tuple[str, ...], ranks: int, wire: Wire, _: None, grads: tuple[jax.Array, ...]) -> tuple[Any]:
    del wire
    return (carry_gradients(grads, partial(_all_to_all, axes=axes, ranks=ranks)),)


_swap.defvjp(lambda arrays, axes, ranks, wire: (_swap(arrays, axes, ranks, wire), None), _swap_backward)


def send(
    arrays: tuple[jax.Array, ...],
    size: int,
    updates: Updates,
    axes: tuple[str, ...],
    fills: tuple[float, ...],
    wire: Wire = None,
) -> tuple[jax.Array, ...]:
    """Send rows of [W, ...] arrays, together, along `updates` into `size` rows that hold `fills` where nothing arrives.

    `wire` is as in `swap`. The gradient is the way back; rows that nobody sent get exactly zero.
    """
    varying = varying_axes(arrays, updates) | set(axes)
    arrays, updates = vary(arrays, varying), Updates(*vary(tuple(updates), varying))
    return _send(arrays, updates, arrays[0].shape[0], size, axes, fills, wire)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5, 6))
def _send(
    arrays: tuple[jax.Array, ...],
    updates: Updates,
    slots: int,
    size: int,
    axes: tuple[str, ...],
    fills: tuple[float, ...],
    wire: Wire,
) -> tuple[jax.Array, ...]:
    empty = [jnp.full((size, *a.shape[1:]), fill, a.dtype) for a, fill in zip(arrays, fills, strict=True)]
    empty = encode(empty, wire)
    buffer = vary(join(empty) if len(empty) > 1 else empty[0], varying_axes(arrays))
    return carry(arrays, partial(_ragged, buffer_VX=buffer, updates=updates, axes=axes), wire)


def _ragged(rows_WX: jax.Array, buffer_VX: jax.Array, updates: Updates, axes: tuple[str, ...]) -> jax.Array:
    if chips()[1] == "cpu":
        return _emulate(rows_WX, buffer_VX, updates, axes)
    return lax.ragged_all_to_all(
        rows_WX, buffer_VX, updates.input, updates.send, updates.output, updates.receive, axis_name=axes
    )


def _forward(arrays, updates, slots, size, axes, fills, wire):
    return _send(arrays, updates, slots, size, axes, fills, wire), updates


def _backward(slots, size, axes, fills, wire, updates, grads):
    def back(payload: jax.Array) -> jax.Array:
        buffer = vary(jnp.zeros((slots, *payload.shape[1:]), payload.dtype), varying_axes(payload))
        return _ragged(payload, buffer, updates.reverse(), axes)

    return carry_gradients(grads, back), None


_send.defvjp(_forward, _backward)


def _emulate(rows_WX: jax.Array, buffer_VX: jax.Array, updates: Updates, axes: tuple[str, ...]) -> jax.Array:
    """Gather everything, then pick what is for this rank."""
    slots, parts = rows_WX.shape[0], updates.send.size // lax.axis_size(axes)
    source = jnp.arange(updates.send.size, dtype=jnp.int32) // parts
    begin = jnp.where(updates.receive > 0, updates.land, jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(begin)
    place = jnp.arange(buffer_VX.shape[0], dtype=jnp.int32)
    part = order[jnp.maximum(jnp.searchsorted(begin[order], place, side="right") - 1, 0)]
    within = place - updates.land[part]
    there = (within >= 0) & (within < updates.receive[part])
    index = jnp.where(there, source[part] * slots + updates.home[part] + within, 0)
    everything = lax.all_gather(rows_WX, axes, axis=0, tiled=True)
    there = there.reshape(-1, *[1] * (rows_WX.ndim - 1))
    return jnp.where(there, jnp.take(everything, index, axis=0, mode="clip"), buffer_VX)
