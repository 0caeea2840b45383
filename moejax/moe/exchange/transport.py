"""`ragged_all_to_all` with its adjoint; on CPU, which has no such collective, the same by an all_gather."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels.table import chips
from moejax.moe.admission import starts
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


def send(rows_WX: jax.Array, size: int, updates: Updates, axis: str, fill: float) -> jax.Array:
    """Send rows along `updates` into a buffer of `size` rows that holds `fill` where nothing arrives.

    The gradient is the way back; rows that nobody sent get exactly zero.
    """
    axes = varying_axes(rows_WX, *updates) | {axis}
    rows_WX, updates = vary(rows_WX, axes), Updates(*vary(tuple(updates), axes))
    return _send(rows_WX, updates, rows_WX.shape[0], size, axis, fill)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _send(rows_WX: jax.Array, updates: Updates, slots: int, size: int, axis: str, fill: float) -> jax.Array:
    buffer = jnp.full((size, *rows_WX.shape[1:]), fill, rows_WX.dtype)
    buffer = vary(buffer, varying_axes(rows_WX))
    if chips()[1] == "cpu":
        return _emulate(rows_WX, buffer, updates, axis)
    return lax.ragged_all_to_all(
        rows_WX, buffer, updates.input, updates.send, updates.output, updates.receive, axis_name=axis
    )


def _forward(rows_WX, updates, slots, size, axis, fill):
    return _send(rows_WX, updates, slots, size, axis, fill), updates


def _backward(slots, size, axis, fill, updates, grad):
    return _send(grad, updates.reverse(), size, slots, axis, 0.0), None


_send.defvjp(_forward, _backward)


def _emulate(rows_WX: jax.Array, buffer_VX: jax.Array, updates: Updates, axis: str) -> jax.Array:
    """Gather everything, then pick what is for this rank."""
    slots, parts = rows_WX.shape[0], updates.send.size // lax.axis_size(axis)
    source = jnp.arange(updates.send.size, dtype=jnp.int32) // parts
    begin = jnp.where(updates.receive > 0, updates.land, jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(begin)
    place = jnp.arange(buffer_VX.shape[0], dtype=jnp.int32)
    part = order[jnp.maximum(jnp.searchsorted(begin[order], place, side="right") - 1, 0)]
    within = place - updates.land[part]
    there = (within >= 0) & (within < updates.receive[part])
    index = jnp.where(there, source[part] * slots + updates.home[part] + within, 0)
    everything = lax.all_gather(rows_WX, axis, axis=0, tiled=True)
    there = there.reshape(-1, *[1] * (rows_WX.ndim - 1))
    return jnp.where(there, jnp.take(everything, index, axis=0, mode="clip"), buffer_VX)
