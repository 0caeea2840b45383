"""What `jax.vjp` keeps, apart from what is there anyway.

A vjp function is a pytree whose leaves are residuals. Weights and tokens are among them; they need no copy for every
microbatch in flight, so leaves that are one of `known` are left out, and put back from the same place in backward.
"""

from collections.abc import Callable
from typing import Any

import jax


class Residuals:
    """How residuals of one vjp are taken apart and put together again; filled while forward is traced."""

    def __init__(self) -> None:
        self._structure: Any = None
        self._places: list[int | None] = []

    def split(self, pull: Callable[..., Any], known: Any) -> list[jax.Array]:
        """The leaves of a vjp function that are no leaf of `known`."""
        leaves, self._structure = jax.tree.flatten(pull)
        there = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(known))}
        self._places = [there.get(id(leaf)) for leaf in leaves]
        return [leaf for leaf, place in zip(leaves, self._places, strict=True) if place is None]

    def join(self, saved: list[jax.Array], known: Any) -> Callable[..., Any]:
        """The vjp function from what `split` returned, and the same `known` in another place of the program."""
        rest, there = iter(saved), jax.tree.leaves(known)
        leaves = [next(rest) if place is None else there[place] for place in self._places]
        return jax.tree.unflatten(self._structure, leaves)
