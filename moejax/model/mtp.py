"""Multi-token prediction: modules behind the model that predict tokens further ahead (DeepSeek-V3, section 2.2).

Module k joins the hidden state of position i in the module before with the embedding of token i + k, and runs one
layer like the model's last one; a norm of its own and the model's head then predict token i + k + 1. The first
module reads what the last layer of the model returns, before the final norm. Embedding and head are the model's. A
position counts as long as all of these tokens are in its document and row; where they are not, the token does not
exist for the module: it is not routed, and has no loss.

In a pipeline modules run where the head runs: at the tick in which a microbatch leaves the last stage, on all stages,
each of which has the modules' weights and takes its share of the sequences.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moejax.axes import CONTEXT, STAGE
from moejax.config import Config, LayerGroup, ModelConfig
from moejax.model.attention import RMSNorm
from moejax.model.group import Group, Params
from moejax.model.parameters import Abstract, weight
from moejax.model.tokens import Tokens
from moejax.moe.statistics import Statistics
from moejax.nn.linear import linear
from moejax.varying import vary, varying_axes


class Join(nnx.Module):
    """What stands around the layer of a module."""

    def __init__(self, model: ModelConfig):
        width = model.d_model
        self.hidden_norm = RMSNorm(width, model.norm_eps)
        self.embed_norm = RMSNorm(width, model.norm_eps)
        self.projection = weight((2 * width, width), ("joined", "embed"), model.init_std)
        self.final_norm = RMSNorm(width, model.norm_eps)

    def __call__(self, x_BSD: jax.Array, embedded_BSD: jax.Array) -> jax.Array:
        """Input of the layer (equation 21)."""
        both = [self.hidden_norm(x_BSD), self.embed_norm(embedded_BSD)]
        return linear(jnp.concatenate(both, axis=-1), self.projection[...])


class Modules(Group):
    """All modules, stacked like the layers of a group."""

    def __init__(self, config: Config):
        model = config.model
        super().__init__(config, LayerGroup(model.mtp, (model.specs[-1],)), config.remat.of(len(model.layers) - 1))
        self.join, self.stages = Abstract(Join(model)), config.mesh.stage

    def metadata(self, name: str) -> Params:
        """One metadata field of every parameter."""
        return super().metadata(name) | {"join": self.join.metadata(name)}

    @property
    def one(self) -> Params:
        """Shape and type of every parameter of one module."""
        return super().one | {"join": self.join.shapes}

    def predict(
        self,
        weights: Params,
        x_BSD: jax.Array,
        embedded_PBSD: jax.Array,
        segments_PBS: jax.Array,
        positions: jax.Array,
        gather: Callable[[Params], Params],
    ) -> tuple[jax.Array, Statistics | None]:
        """Run module after module. Arguments and results are the same on all pipeline stages, but for the weights.

        Args:
            weights: Stored weights of all modules.
            x_BSD: What the last layer of the model returns.
            embedded_PBSD: Embeddings of the tokens k ahead, k = 1 to P.
            segments_PBS: Documents; 0 where a module has no token to predict.
            positions: Positions of the tokens, [B, S].
            gather: Stored weights of a module to compute weights.

        Returns:
            Normed hidden states of each module [P, B, S, D], and statistics stacked over modules.
        """
        x_BSD, positions = (self._share(a, 0) for a in (x_BSD, positions))
        embedded_PBSD, segments_PBS = (self._share(a, 1) for a in (embedded_PBSD, segments_PBS))

        def one(x_BSD: jax.Array, step: tuple[Params, jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
            stored, embedded_BSD, segments = step
            layers = gather(stored)
            join: Join = self.join.bind(layers["join"])
            x_BSD, statistics = self.repetition(layers, join(x_BSD, embedded_BSD), Tokens(segments, positions))
            return x_BSD, (join.final_norm(x_BSD), statistics)

        run = self.recomputed(one, always=self.gathers)
        _, (y_PBSD, statistics) = lax.scan(run, x_BSD, (weights, embedded_PBSD, segments_PBS))
        statistics = jax.tree.map(lambda s: s.reshape(-1, *s.shape[2:]), statistics)
        if self.stages == 1:
            return y_PBSD, statistics
        with jax.named_scope("pipeline"):
            return self._whole(y_PBSD, 1), lax.psum(statistics, STAGE)

    def _share(self, a: jax.Array, axis: int) -> jax.Array:
        """This stage's share of the sequences."""
        if self.stages == 1:
            return a
        rows = a.shape[axis] // self.stages
        with jax.named_scope("pipeline"):
            return lax.dynamic_slice_in_dim(vary(a, [STAGE]), lax.axis_index(STAGE) * rows, rows, axis)

    def _whole(self, a: jax.Array, axis: int) -> jax.Array:
        """All sequences, from the shares of the stages: the sum of what is zero elsewhere is equal on all."""
        rows = a.shape[axis]
        shape = (*a.shape[:axis], rows * self.stages, *a.shape[axis + 1 :])
        empty = vary(jnp.zeros(shape, a.dtype), varying_axes(a))
        return lax.psum(lax.dynamic_update_slice_in_dim(empty, a, lax.axis_index(STAGE) * rows, axis), STAGE)


def shifted(batch: Params, modules: int, context: int) -> Params:
    """The batch as each module sees it: `tokens`, `targets` and `segments` k ahead, k = 1 to `modules`, [P, B, S].

    Segments are 0 where the token k ahead is in another document or row.

    Args:
        batch: Arrays [B, S] of this device.
        modules: Number of modules P; at most S.
        context: Shards of the sequence: the first tokens of a shard are also those behind the shard before.
    """
    names = ("tokens", "targets", "segments")
    arrays = jnp.stack([batch[name] for name in names])
    first = arrays[:, :, :modules]
    if context > 1:
        with jax.named_scope("ahead"):
            behind = lax.ppermute(first, CONTEXT, [(shard + 1, shard) for shard in range(context - 1)])
    else:
        behind = jnp.zeros_like(first)
    length, arrays = arrays.shape[2], jnp.concatenate([arrays, behind], axis=2)
    found = jnp.stack([arrays[:, :, k : k + length] for k in range(1, modules + 1)], axis=1)
    later: Params = dict(zip(names, found, strict=True))
    later["segments"] = jnp.where(later["segments"] == batch["segments"], later["segments"], 0)
    return later
