"""What layers know of their tokens, and layers that are not there."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.varying import vary, varying_axes


class Tokens(NamedTuple):
    """What a layer knows of its tokens.

    Attributes:
        segments: Document inside the row, from 1; 0 is padding; [B, S] int32.
        positions: Position inside the document; [B, S] int32.
        live: False where a pipeline has no layer, or no microbatch, to run; None if it always has.
    """

    segments: jax.Array
    positions: jax.Array
    live: jax.Array | None = None

    @property
    def valid(self) -> jax.Array:
        """Tokens that exist [B, S]; none if not live."""
        exist = self.segments > 0
        return exist if self.live is None else exist & self.live

    def when_live(self, function: Callable[[jax.Array], jax.Array], x: jax.Array, apart: bool) -> jax.Array:
        """`function(x)`, of the shape of `x`; zero if not live.

        Args:
            function: What to compute.
            x: Its argument.
            apart: Whether the function has no collective: it is not run then if not live. Stages differ in that, and a
                collective that some devices do not enter never ends.
        """
        if self.live is None:
            return function(x)
        if not apart:
            y = function(x)
            return jnp.where(self.live, y, jnp.zeros_like(y))
        return lax.cond(self.live, function, lambda x: vary(jnp.zeros_like(x), varying_axes(x)), x)
