"""The decoder and its loss in the pieces that a pipeline runs."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax.axes import STAGE, TOKEN_AXES
from moejax.config import Config
from moejax.model.decoder import Decoder, Params, Sums
from moejax.model.tokens import Tokens
from moejax.moe.statistics import Statistics
from moejax.ordering import after
from moejax.schedule.pipeline import Parts, Pipeline
from moejax.schedule.table import make_table
from moejax.sharding import place_layers
from moejax.stages import plan_stages
from moejax.train.objective import losses, with_balance


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
        ends, groups, ce, statistics = self._pipeline(ahead).gradients()
        return {**ends, **groups}, Sums(ce, self._all_layers(statistics))

    def cross_entropy(self) -> jax.Array:
        """Sum over valid tokens in nats, without gradients."""
        return self._pipeline({}).forward()[0]

    def _ahead(self) -> Mapping[str, jax.Array]:
        """Requested routes of the whole step, of this stage's slots: by a forward pass, if the scope asks for them."""
        if self.config.loss.balance_scope != "global_batch" or self.config.train.microbatches == 1:
            return {}
        with jax.named_scope("prepass"):
            found = self._pipeline({}).forward()[1]
            return {k: lax.psum(s.requested_E, TOKEN_AXES) for k, s in found.items() if s is not None}

    def _pipeline(self, ahead: Mapping[str, jax.Array]) -> Pipeline:
        decoder, tied, names = self.decoder, self.config.model.tie_embeddings, list(self.decoder.groups)
        parts = Parts(
            embed=decoder.embed,
            unembed=decoder.unembed,
            layer={name: self._layer(name, ahead.get(name)) for name in names},
            head=self._head,
            head_keys=("final_norm", "embed" if tied else "head"),
            per_chunk=dict(zip(names, self.stages.per_chunk, strict=True)),
            live={name: np.asarray(s) >= 0 for name, s in zip(names, self.stages.slots, strict=True)},
        )
        ends = {key: value for key, value in self.weights.items() if key not in decoder.groups}
        groups = {key: self.weights[key] for key in names}
        return Pipeline(parts, self.table, ends, groups, self.microbatches)

    def _head(self, ends: Params, x_BSD: jax.Array, microbatch: Params) -> tuple[jax.Array, jax.Array]:
        x_BSD = self.decoder.bind_ends(ends).final_norm(x_BSD)
        ce = self.decoder.cross_entropy(ends, x_BSD, microbatch)
        return losses(Sums(ce, None), self.num_tokens, self.config)["loss"], ce

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

    def _all_layers(self, statistics: Mapping[str, Statistics | None]) -> Statistics | None:
        """Statistics of all layers [L, ...], from those of each stage's slots."""
        found = []
        for (name, group), slots in zip(self.decoder.groups.items(), self.stages.slots, strict=True):
            mine = statistics[name]
            if mine is not None:
                whole = jax.tree.map(lambda s, n=group.repeat, slots=slots: place_layers(s, slots, n), mine)
                found.append(jax.tree.map(lambda s: s.reshape(-1, *s.shape[2:]), lax.psum(whole, STAGE)))
        return jax.tree.map(lambda *s: jnp.concatenate(s), *found) if found else None
