"""Pipeline over the `stage` axis: forward and backward by hand, in one scan for each phase of a table.

In a tick a stage runs one unit forward and one unit backward. Activations go to the next stage, their gradients to the
previous one, by `ppermute`. Forward keeps what `jax.vjp` of each layer keeps (the recomputation policy decides how much
that is) in a slot of the table; backward adds each layer's gradients to float32 accumulators in place. Embedding and
head are shards of the vocabulary on all stages, so that neither is extra work of one stage. What a bubble computes is
masked: tokens that do not exist are not routed, and gradients from a bubble are exactly zero.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moejax.axes import STAGE, TOKEN_AXES
from moejax.kernels import merge, split_constants
from moejax.ordering import after
from moejax.schedule.parts import Microbatch, Parts, Tree
from moejax.schedule.residuals import Residuals
from moejax.schedule.table import Phase, Table
from moejax.varying import vary, varying_axes

EVERYWHERE = (*TOKEN_AXES, STAGE)


def _at(tree: Tree, index: jax.Array) -> Tree:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), tree)


def _put(tree: Tree, index: jax.Array, value: Tree) -> Tree:
    return jax.tree.map(lambda a, v: lax.dynamic_update_index_in_dim(a, v, index, 0), tree, value)


def _when(valid: jax.Array, function: Callable[..., Any], like: Tree, *args: Any) -> Any:
    """`function(*args)`, or zeros like `like`, by a predicate that is the same on all devices."""
    return lax.cond(valid, function, lambda *_: like, *args)


class Pipeline:
    """A step over a table.

    Args:
        parts: The model.
        table: The schedule.
        ends: Weights of embedding, last norm and head, and others that the head reads.
        groups: Weights of each group of layers, stacked over this stage's slots.
        microbatches: Arrays [M, ...].
    """

    def __init__(self, parts: Parts, table: Table, ends: Tree, groups: Mapping[str, Tree], microbatches: Microbatch):
        self.parts, self.table, self.microbatches = parts, table, microbatches
        self.groups, self.constants = split_constants(dict(groups))
        self.ends, self.end_constants = split_constants(ends)
        self.stage = lax.axis_index(STAGE)
        self.residuals = {name: Residuals() for name in groups}
        self.live = {name: jnp.asarray(live)[self.stage] for name, live in parts.live.items()}
        x = jax.eval_shape(parts.embed, ends, self._microbatch(jnp.int32(0)))
        self.zero_x = vary(jnp.zeros(x.shape, x.dtype), EVERYWHERE)
        self.like_x = vary(jnp.zeros(x.shape, x.dtype), TOKEN_AXES)
        sums = jax.eval_shape(parts.head, ends, self.like_x, self._microbatch(jnp.int32(0)), None)[1]
        self.zero_sums = jax.tree.map(lambda s: vary(jnp.zeros(s.shape, s.dtype), TOKEN_AXES), sums)
        self.zero_ends = jax.tree.map(lambda w: vary(jnp.zeros(w.shape, jnp.float32), varying_axes(w)), self.ends)

    def _microbatch(self, index: jax.Array) -> Microbatch:
        return _at(self.microbatches, index)

    def _zeros(self, tree: Tree, lead: int) -> Tree:
        """Zeros [lead, ...] for each leaf."""
        return jax.tree.map(
            lambda a: vary(jnp.zeros((lead, *a.shape), a.dtype), varying_axes(a) | set(EVERYWHERE)), tree
        )

    # Forward

    def _layers(self, row: Tree, x: jax.Array, statistics: Tree, keep: bool) -> tuple[jax.Array, Tree, Tree]:
        """One unit forward: hidden states, what backward needs of each group, and statistics with this unit's added."""
        saved, statistics = {}, dict(statistics)
        microbatch = self._microbatch(row["forward_microbatch"])
        for name, layer in self.parts.layer.items():
            width = self.parts.per_chunk[name]

            def one(x, i, name=name, layer=layer, width=width, before=statistics[name]):  # type: ignore[no-untyped-def]
                place = row["forward_chunk"] * width + i
                w, live = _at(self.groups[name], place), self.live[name][place] & row["forward_valid"]
                rest = _at(self.constants[name], place)

                def run(w: Tree, x: jax.Array) -> Any:
                    return layer(merge(w, rest), x, microbatch, live, _at(before, place), place)

                if not keep:
                    (y, _), found = run(w, x)
                    return y, ((), found)
                (y, _), pull, found = jax.vjp(run, w, x, has_aux=True)
                return y, (self.residuals[name].split(pull, (w, rest, microbatch, live)), found)

            x, (saved[name], found) = lax.scan(one, x, jnp.arange(width))
            start = row["forward_chunk"] * width
            statistics[name] = jax.tree.map(
                lambda total, new, start=start, width=width: lax.dynamic_update_slice_in_dim(
                    total, lax.dynamic_slice_in_dim(total, start, width) + new, start, 0
                ),
                statistics[name],
                found,
            )
        return x, saved, statistics

    def _forward(self, carry: Tree, row: Tree, keep: bool) -> tuple[Tree, jax.Array]:
        carry = dict(carry)
        first = (self.stage == 0) & (row["forward_chunk"] == 0)
        microbatch = self._microbatch(row["embed_microbatch"])

        @jax.named_scope("embed")
        def embed(x: jax.Array) -> jax.Array:
            return jnp.where(first, self.parts.embed(self.ends, microbatch), x)

        x = lax.cond(row["embed_valid"], embed, lambda x: x, carry["x"])
        y, saved, carry["statistics"] = self._layers(row, x, carry["statistics"], keep)
        if keep:
            carry["stash"] = _put(carry["stash"], row["forward_slot"], saved)
        return carry, y

    def _last(self, y: jax.Array) -> jax.Array:
        """The last stage's value, on all stages."""
        return lax.psum(jnp.where(self.stage == self.table.stages - 1, y, jnp.zeros_like(y)), STAGE)

    def _loss(self, read: Tree, x: jax.Array, row: Tree, before: Tree) -> tuple[jax.Array, Tree]:
        weights = merge(self.ends | read, self.end_constants)
        return self.parts.head(weights, x, self._microbatch(row["head_microbatch"]), before)

    def _head(self, carry: Tree, row: Tree, y: jax.Array) -> Tree:
        """Loss of the microbatch that leaves the last stage, and the gradient that starts its backward pass."""
        read = {key: self.ends[key] for key in self.parts.head_keys}

        def run(y: jax.Array) -> Any:
            grad = jax.value_and_grad(self._loss, argnums=(0, 1), has_aux=True)
            (_, sums), (dread, dx) = grad(read, self._last(y), row, carry["sums"])
            return sums, jax.tree.map(lambda g: g.astype(jnp.float32), dread), dx

        with jax.named_scope("head"):
            like = (self.zero_sums, {key: self.zero_ends[key] for key in read}, self.like_x)
            sums, dread, dx = _when(row["head_valid"], run, like, y)
        grads = carry["ends"] | jax.tree.map(jnp.add, {key: carry["ends"][key] for key in read}, dread)
        sums = jax.tree.map(jnp.add, carry["sums"], sums)
        return carry | {"sums": sums, "ends": grads, "dhead": _put(carry["dhead"], row["head_slot"], dx)}

    # Backward

    def _backward(self, carry: Tree, row: Tree) -> tuple[Tree, jax.Array]:
        valid = row["backward_valid"]
        last = (self.stage == self.table.stages - 1) & (row["backward_chunk"] == self.table.virtual - 1)
        dy = jnp.where(last, _at(carry["dhead"], row["grad_slot"]), carry["dx"])
        dy = jnp.where(valid, dy, jnp.zeros_like(dy))
        microbatch = self._microbatch(after(carry["dhead"].ravel()[0], row["backward_microbatch"]))
        grads = dict(carry["groups"])
        for name in reversed(list(self.parts.layer)):
            width = self.parts.per_chunk[name]

            def one(pair, step, name=name, width=width):  # type: ignore[no-untyped-def]
                (dy, total), (i, saved) = pair, step
                place = row["backward_chunk"] * width + i
                w, live = _at(self.groups[name], place), self.live[name][place] & valid
                rest = _at(self.constants[name], place)
                pull = self.residuals[name].join(saved, (w, rest, microbatch, live))
                dw, dx = pull((dy, vary(live.astype(jnp.float32), EVERYWHERE)))
                total = jax.tree.map(lambda t, g: t.at[place].add(g.astype(t.dtype)), total, dw)
                return (dx, total), None

            slot = after(dy[0, 0, 0], row["backward_slot"])  # what is exchanged again waits for its turn too
            saved = _at(carry["stash"][name], slot)
            (dy, grads[name]), _ = lax.scan(one, (dy, grads[name]), (jnp.arange(width), saved), reverse=True)
        first = (self.stage == 0) & (row["backward_chunk"] == 0) & valid

        @jax.named_scope("embed")
        def add(total: Tree, _: jax.Array) -> tuple[Tree, jax.Array]:
            dx = lax.psum(jnp.where(first, dy, jnp.zeros_like(dy)), STAGE)
            total = self.parts.unembed(total, self._microbatch(row["unembed_microbatch"]), dx)
            return total, dx[0, 0, 0].astype(jnp.float32)

        ends, done = lax.cond(row["unembed_valid"], add, lambda *same: same, carry["ends"], carry["done"])
        return carry | {"groups": grads, "ends": ends, "done": done}, dy

    # Ticks

    def _send(self, x: jax.Array, step: int) -> jax.Array:
        """To the next stage (or with -1 the previous one); chunks go round, so it wraps."""
        stages = self.table.stages
        with jax.named_scope("pipeline"):
            return lax.ppermute(x, STAGE, [(s, (s + step) % stages) for s in range(stages)])

    def _rows(self, phase: Phase) -> Tree:
        return {key: jnp.asarray(column[phase.start : phase.stop]) for key, column in self.table.columns.items()}

    def _row(self, row: Tree) -> Tree:
        return {key: value if value.ndim == 0 else value[self.stage] for key, value in row.items()}

    def _start(self, statistics: Tree) -> Tree:
        return {"x": self.zero_x, "statistics": statistics, "sums": self.zero_sums}

    def _empty_statistics(self) -> Tree:
        """Zeros for each group's statistics, [slots, ...]."""
        found, microbatch, live = {}, self._microbatch(jnp.int32(0)), vary(jnp.bool_(True), (STAGE,))
        for name, layer in self.parts.layer.items():
            w = _at(merge(self.groups[name], self.constants[name]), jnp.int32(0))
            slots = self.parts.per_chunk[name] * self.table.virtual
            kind = jax.eval_shape(layer, w, self.zero_x, microbatch, live, None, jnp.int32(0))[1]
            found[name] = self._zeros(kind, slots)
        return found

    def gradients(self) -> tuple[Tree, Mapping[str, Tree], Tree, Tree]:
        """Float32 gradients of ends and of groups, sums of the head, and statistics of this stage's slots."""
        carry = self._start(self._empty_statistics())
        carry |= {"dx": self.zero_x, "ends": self.zero_ends, "done": vary(jnp.float32(0), TOKEN_AXES)}
        carry["groups"] = jax.tree.map(lambda w: vary(jnp.zeros(w.shape, jnp.float32), varying_axes(w)), self.groups)
        carry["dhead"] = vary(jnp.zeros((self.table.head_depth + 1, *self.zero_x.shape), self.zero_x.dtype), TOKEN_AXES)
        row = self._row(_at(self._rows(Phase(0, 1, True, False)), jnp.int32(0)))
        _, saved, _ = jax.eval_shape(lambda: self._layers(row, self.zero_x, carry["statistics"], keep=True))
        carry["stash"] = self._zeros(saved, self.table.depth + 1)
        for phase in self.table.phases():

            def tick(carry: Tree, row: Tree, phase: Phase = phase) -> tuple[Tree, None]:
                row = self._row(row)
                if phase.forward:
                    carry, y = self._forward(carry, row, keep=True)
                    carry = self._head(carry, row, y) | {"x": self._send(y, 1)}
                if phase.backward:
                    carry, dx = self._backward(carry, row)
                    carry = carry | {"dx": self._send(dx, -1)}
                return carry, None

            carry, _ = lax.scan(tick, carry, self._rows(phase))
        return carry["ends"], carry["groups"], carry["sums"], after(carry["done"], carry["statistics"])

    def forward(self) -> tuple[Tree, Tree]:
        """Sums of the head, and statistics of this stage's slots, without gradients."""

        def tick(carry: Tree, row: Tree) -> tuple[Tree, None]:
            row = self._row(row)
            carry, y = self._forward(carry, row, keep=False)
            with jax.named_scope("head"):
                before, like = carry["sums"], self.zero_sums
                sums = _when(row["head_valid"], lambda y: self._loss({}, self._last(y), row, before)[1], like, y)
            return carry | {"sums": jax.tree.map(jnp.add, carry["sums"], sums), "x": self._send(y, 1)}, None

        stop = max(phase.stop for phase in self.table.phases() if phase.forward)
        carry, _ = lax.scan(tick, self._start(self._empty_statistics()), self._rows(Phase(0, stop, True, False)))
        return carry["sums"], carry["statistics"]
