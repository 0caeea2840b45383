"""The decoder: embedding, groups of layers under `lax.scan`, head; and its loss on one device."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import Config, ModelConfig
from moejax.model.attention import RMSNorm
from moejax.model.group import Group, Params
from moejax.model.mtp import Modules, shifted
from moejax.model.parameters import Abstract, weight
from moejax.model.tokens import Tokens
from moejax.moe.balance import moved_bias
from moejax.moe.statistics import Statistics
from moejax.nn.cross_entropy import cross_entropy
from moejax.nn.embedding import add_gradient, embed
from moejax.ordering import after
from moejax.sharding import compute_axes

GatherLayer = Callable[[str, Params], Params]
"""Turns one repetition's slice of a group's stored weights into compute weights."""


class Sums(NamedTuple):
    """Sums over this device's valid tokens of one microbatch; they add up over devices and microbatches.

    Attributes:
        ce: Cross-entropy in nats, float32.
        statistics: Of every MoE layer, stacked [L, ...], multi-token prediction last; None for a model without.
        mtp: Cross-entropy of all modules of multi-token prediction together; None for a model without.
    """

    ce: jax.Array
    statistics: Statistics | None
    mtp: jax.Array | None = None


class Ends(nnx.Module):
    """What stands before and after the layers: embedding, last norm, output head."""

    def __init__(self, model: ModelConfig):
        self.embed = weight((model.vocab_size, model.d_model), ("vocab", "embed"), model.init_std)
        self.final_norm = RMSNorm(model.d_model, model.norm_eps)
        tied = model.tie_embeddings
        self.head = None if tied else weight((model.d_model, model.vocab_size), ("embed", "vocab"), model.init_std)

    @property
    def head_DV(self) -> jax.Array:
        """Output projection."""
        return self.embed[...].T if self.head is None else self.head[...]


class Decoder:
    """A decoder language model: abstract parameters, and functions of them."""

    def __init__(self, config: Config):
        self.config, self.dtype = config, jnp.dtype(config.model.dtype)
        groups = enumerate(config.model.layers)
        self.groups = {f"groups_{i}": Group(config, group, config.remat.of(i)) for i, group in groups}
        self.mtp = Modules(config) if config.model.mtp else None
        self.stacked: dict[str, Group] = self.groups | ({"mtp": self.mtp} if self.mtp else {})
        self.ends = Abstract(Ends(config.model))
        self.vocab_axes = compute_axes(config, "vocab")

    @property
    def dims(self) -> Params:
        """Logical dims of every parameter."""
        stacked = {key: group.metadata("dims") for key, group in self.stacked.items()}
        stacked = jax.tree.map(lambda d: ("layers", *d), stacked, is_leaf=lambda x: isinstance(x, tuple))
        return self.ends.metadata("dims") | stacked

    @property
    def stds(self) -> Params:
        """Initial standard deviation of every parameter."""
        return self.ends.metadata("std") | {key: group.metadata("std") for key, group in self.stacked.items()}

    @property
    def shapes(self) -> Params:
        """Shape and type of every parameter, float32."""
        return self.ends.shapes | {key: group.shapes for key, group in self.stacked.items()}

    def layers(self, weights: Params, batch: Params, gather_layer: GatherLayer) -> tuple[jax.Array, Statistics | None]:
        """What the last layer returns [B, S, D], and statistics of the MoE layers stacked [L, ...]."""
        tokens, found = Tokens(batch["segments"], batch["positions"]), []
        x_BSD = self.embed(weights, batch)
        for name, group in self.groups.items():
            x_BSD, statistics = group.apply(weights[name], x_BSD, tokens, partial(gather_layer, name))
            found.append(statistics)
        return x_BSD, joined(found)

    def norm(self, weights: Params, x_BSD: jax.Array) -> jax.Array:
        """Final hidden states, ready for the head."""
        return self.bind_ends(weights).final_norm(x_BSD)

    def ahead(
        self, weights: Params, x_BSD: jax.Array, batch: Params, gather_layer: GatherLayer
    ) -> tuple[jax.Array, Statistics | None]:
        """Cross-entropy of all modules of multi-token prediction, and statistics of their MoE layers.

        Args:
            weights: Compute weights.
            x_BSD: What the last layer of the model returns; with pipeline stages, on all of them.
            batch: The batch that it is of.
            gather_layer: As in `sums`.
        """
        assert self.mtp is not None
        with jax.named_scope("mtp"):
            later = shifted(after(x_BSD[0, 0, 0], batch), self.mtp.repeat, self.config.mesh.context)
            embedded = self.embed(weights, later)
            y_PBSD, statistics = self.mtp.predict(
                weights["mtp"], x_BSD, embedded, later["segments"], batch["positions"], partial(gather_layer, "mtp")
            )
            return self.cross_entropy(weights, y_PBSD, later), statistics

    def embed(self, weights: Params, batch: Params) -> jax.Array:
        """Embedded tokens [B, S, D]."""
        with jax.named_scope("embed"):
            return embed(self.bind_ends(weights).embed[...], batch["tokens"], self.vocab_axes)

    def unembed(self, grads: Params, batch: Params, dx_BSD: jax.Array) -> Params:
        """Gradients of embedding and head with those of `embed` added, from the gradient of its result."""
        return grads | {"embed": add_gradient(grads["embed"], batch["tokens"], dx_BSD, self.vocab_axes)}

    def cross_entropy(self, weights: Params, x_BSD: jax.Array, batch: Params) -> jax.Array:
        """Sum over valid tokens, in nats, from normed final hidden states."""
        with jax.named_scope("head"):
            x_TD, valid_T = x_BSD.reshape(-1, x_BSD.shape[-1]), batch["segments"].reshape(-1) > 0
            head_DV = self.bind_ends(weights).head_DV
            return cross_entropy(x_TD, head_DV, batch["targets"].reshape(-1), valid_T, self.vocab_axes)

    def move_selection_biases(self, params: Params, requested_LE: jax.Array, rate: jax.Array) -> Params:
        """Parameters with the selection bias of every MoE layer moved against its load in a whole step."""
        params, first = dict(params), 0
        for name, group in self.stacked.items():
            moe = [key for key, block in group.blocks.items() if "router" in block.shapes["ffn"]]
            if not moe:
                continue
            last = first + group.repeat * len(moe)
            requested = requested_LE[first:last].reshape(group.repeat, len(moe), -1)
            first, params[name] = last, dict(params[name])
            for i, key in enumerate(moe):
                block, ffn = params[name][key], params[name][key]["ffn"]
                ffn = ffn | {"selection_bias": moved_bias(ffn["selection_bias"], requested[:, i], rate)}
                params[name][key] = block | {"ffn": ffn}
        return params

    def bind_ends(self, weights: Params) -> Ends:
        """Embedding, last norm and head with their weights."""
        return self.ends.bind({key: value for key, value in weights.items() if key not in self.stacked})

    def sums(self, weights: Params, batch: Params, gather_layer: GatherLayer) -> Sums:
        """Cross-entropy and statistics summed over a batch of this device."""
        x_BSD, statistics = self.layers(weights, batch, gather_layer)
        ce = self.cross_entropy(weights, self.norm(weights, x_BSD), batch)
        if self.mtp is None:
            return Sums(ce, statistics)
        mtp, later = self.ahead(weights, x_BSD, batch, gather_layer)
        return Sums(ce, joined([statistics, later]), mtp)


def joined(found: Sequence[Statistics | None]) -> Statistics | None:
    """Statistics [L, ...] of all layers, from those of groups; None where there are none."""
    known = [statistics for statistics in found if statistics is not None]
    return jax.tree.map(lambda *s: jnp.concatenate(s), *known) if known else None
