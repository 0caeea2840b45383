"""Layers whose weights are stacked, so that one program in a loop runs all of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moejax.config import Config, LayerGroup
from moejax.config.parallel import RematPolicy
from moejax.model.block import Block
from moejax.model.parameters import Abstract
from moejax.model.recompute import policy
from moejax.model.tokens import Tokens
from moejax.moe.statistics import Statistics

Params = dict[str, Any]


class Group:
    """A pattern of layers whose weights are stacked over its repetitions."""

    def __init__(self, config: Config, group: LayerGroup, remat: RematPolicy):
        self.repeat = group.repeat
        self.remat: RematPolicy = remat
        self.gathers = config.weights.gather == "layer"
        self.blocks = {str(i): Abstract(Block(config, spec)) for i, spec in enumerate(group.pattern)}

    def metadata(self, name: str) -> Params:
        """One metadata field of every parameter."""
        return {key: block.metadata(name) for key, block in self.blocks.items()}

    @property
    def one(self) -> Params:
        """Shape and type of every parameter of one repetition."""
        return {key: block.shapes for key, block in self.blocks.items()}

    @property
    def shapes(self) -> Params:
        """Shape and type of every parameter, stacked [repeat, ...]."""
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct((self.repeat, *s.shape), s.dtype), self.one)

    def repetition(self, layers: Params, x_BSD: jax.Array, tokens: Tokens) -> tuple[jax.Array, Statistics | None]:
        """The pattern once; statistics stacked over its MoE layers."""
        found = []
        for name, block in self.blocks.items():
            x_BSD, statistics = block.bind(layers[name])(x_BSD, tokens)
            found += [] if statistics is None else [statistics]
        return x_BSD, jax.tree.map(lambda *s: jnp.stack(s), *found) if found else None

    def recomputed(self, function: Callable[..., Any], always: bool = False) -> Callable[..., Any]:
        """`function` under the recomputation policy; `always`: `none` is one too, and keeps no weight twice."""
        if self.remat == "none" and not always:
            return function
        return jax.checkpoint(function, policy=policy(self.remat), prevent_cse=False)

    def apply(self, weights: Params, x_BSD: jax.Array, tokens: Tokens, gather: Callable[[Params], Params]) -> Any:
        """Scan over repetitions; returns hidden states and statistics stacked [repeat x MoE layers of the pattern]."""

        def one(x_BSD: jax.Array, stored: Params) -> tuple[jax.Array, Statistics | None]:
            return self.repetition(gather(stored), x_BSD, tokens)

        x_BSD, statistics = jax.lax.scan(self.recomputed(one, always=self.gathers), x_BSD, weights)
        return x_BSD, jax.tree.map(lambda s: s.reshape(-1, *s.shape[2:]), statistics)
