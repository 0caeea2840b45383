"""The decoder and its loss in the pieces that a pipeline runs."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax.axes import STAGE, TOKEN_AXES
from moejax.config import Config
from moejax.model.decoder import Decoder, Params, Sums, joined
from moejax.model.tokens import Tokens
from moejax.moe.statistics import Statistics
from moejax.ordering import after
from moejax.schedule.pipeline import Parts, Pipeline
from moejax.schedule.table import make_table
from moejax.sharding import place_layers
from moejax.stages import plan_stages
from moejax.train.objective import losses, with_balance
from moejax.varying import vary


class Pipelined:
    """Gradients and sums of a step over pipeline stages, inside `shard_map`.

    Args:
        decoder: The model.
        config: The run.
        weights: Compute weights of this stage.
        microbatches: Arrays [M, ...].
        num_tokens: Valid tokens of the whole step.
    """

    def __init__(
        self, decoder: Decoder, config: Config, weights: Params, microbatches: dict[str, jax.Array], num_tokens: Any
    ):
        self.decoder, self.config, self.num_tokens = decoder, config, num_tokens
        self.weights, self.microbatches, self.stages = weights, microbatches, plan_stages(config)
        pipeline = config.pipeline
        self.table = make_table(
            config.mesh.stage, config.train.microbatches, pipeline.virtual_stages, pipeline.schedule
        )

    def gradients(self) -> tuple[Params, Sums]:
        """Float32 gradients of the compute weights, and sums over microbatches, equal on all stages."""
        ahead = self._ahead()
        if ahead:
            routes = sum(jnp.sum(requested) for requested in ahead.values())
            self.microbatches = after(lax.psum(routes, STAGE), self.microbatches)
        ends, groups, sums, statistics = self._pipeline(ahead).gradients()
        statistics = joined([*self._all_layers(statistics), sums.statistics])
        return {**ends, **groups}, sums._replace(statistics=statistics)

    def cross_entropy(self) -> jax.Array:
        """Sum over valid tokens in nats, without gradients."""
        return self._pipeline({}).forward()[0].ce

    def _ahead(self) -> Mapping[str, jax.Array]:
        """Requested routes of the whole step, of this stage's slots: by a forward pass, if the scope asks for them."""
        if self.config.loss.balance_scope != "global_batch" or self.config.train.microbatches == 1:
            return {}
        with jax.named_scope("prepass"):
            sums, found = self._pipeline({}).forward()
            found = {**found, "mtp": sums.statistics}
            return {k: lax.psum(s.requested_E, TOKEN_AXES) for k, s in found.items() if s is not None}

    def _pipeline(self, ahead: Mapping[str, jax.Array]) -> Pipeline:
        decoder, tied, names = self.decoder, self.config.model.tie_embeddings, list(self.decoder.groups)
        parts = Parts(
            embed=decoder.embed,
            unembed=decoder.unembed,
            layer={name: self._layer(name, ahead.get(name)) for name in names},
            head=partial(self._head, ahead.get("mtp")),
            head_keys=(*{"final_norm", "embed" if tied else "head", *(("embed", "mtp") if decoder.mtp else ())},),
            per_chunk=dict(zip(names, self.stages.per_chunk, strict=True)),
            live={name: np.asarray(s) >= 0 for name, s in zip(names, self.stages.slots, strict=True)},
        )
        ends = {key: value for key, value in self.weights.items() if key not in decoder.groups}
        groups = {key: self.weights[key] for key in names}
        return Pipeline(parts, self.table, ends, groups, self.microbatches)

    def _head(
        self, ahead: jax.Array | None, ends: Params, x_BSD: jax.Array, microbatch: Params, before: Sums | None
    ) -> tuple[jax.Array, Sums]:
        decoder = self.decoder
        sums = Sums(decoder.cross_entropy(ends, decoder.norm(ends, x_BSD), microbatch), None)
        if decoder.mtp is not None:
            mtp, found = decoder.ahead(ends, after(sums.ce, x_BSD), microbatch, lambda name, weights: weights)
            earlier = None if before is None or before.statistics is None else before.statistics.requested_E
            sums = with_balance(Sums(sums.ce, found, mtp), earlier, ahead, self.config)
        return losses(sums, self.num_tokens, self.config)["loss"], vary(sums, TOKEN_AXES)

    def _layer(self, name: str, ahead: jax.Array | None) -> Any:
        group = self.decoder.groups[name]
        run = group.recomputed(group.repetition, always=True)

        def layer(
            w: Params,
            x_BSD: jax.Array,
            microbatch: Params,
            live: jax.Array,
            before: Statistics | None,
            place: jax.Array,
        ) -> tuple[tuple[jax.Array, jax.Array], Statistics | None]:
            x_BSD, found = run(w, x_BSD, Tokens(microbatch["segments"], microbatch["positions"], live))
            if found is not None:
                found = jax.tree.map(lambda s: jnp.where(live, s, jnp.zeros_like(s)), found)
            earlier = None if before is None else before.requested_E
            zero = jnp.zeros_like(x_BSD, jnp.float32, shape=())
            sums = with_balance(Sums(zero, found), earlier, None if ahead is None else ahead[place], self.config)
            return (x_BSD, losses(sums, self.num_tokens, self.config)["loss"]), sums.statistics

        return layer

    def _all_layers(self, statistics: Mapping[str, Statistics | None]) -> list[Statistics]:
        """Statistics of all layers of each group [L, ...], from those of each stage's slots."""
        found = []
        for (name, group), slots in zip(self.decoder.groups.items(), self.stages.slots, strict=True):
            mine = statistics[name]
            if mine is not None:
                whole = jax.tree.map(lambda s, n=group.repeat, slots=slots: place_layers(s, slots, n), mine)
                found.append(jax.tree.map(lambda s: s.reshape(-1, *s.shape[2:]), lax.psum(whole, STAGE)))
        return found
