"""What a kernel is: its backend, tiles and test hooks. Hashable, so that it can be a static argument."""

from dataclasses import dataclass
from typing import Literal

from moejax.errors import UserError, nearest

PALLAS = ("gpu", "mosaic", "tpu")
"""Backends written in Pallas; `gpu` has the Triton lowering, `mosaic` (Hopper) the one that will replace it."""

BACKENDS = ("reference", "cpu", *PALLAS, "xla", "padded")
"""All backends. `reference` is the oracle, `padded` the control with static capacity."""

DIRECTIONS = ("forward", "dgrad", "wgrad")
"""Directions of a grouped matmul; the best backend and tiles differ."""

Direction = Literal["forward", "dgrad", "wgrad"]


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of one program.

    Forward and dgrad make `rows` x `cols` of the result and step through the contraction by `depth`.
    wgrad makes `depth` x `cols` of a weight gradient [K, N] and steps through the rows by `rows`.

    Args:
        rows: Tile of M; the least window of the CPU backend.
        cols: Tile of N.
        depth: Tile of K.
        warps: Warps of a GPU program.
        stages: Depth of a GPU program's load pipeline.
    """

    rows: int = 128
    cols: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise UserError(f"kernel tile {name}={value}: must be greater than zero")


@dataclass(frozen=True)
class Kernel:
    """One backend with what it can be told.

    Args:
        backend: One of `BACKENDS`.
        tiles: Tiles of `cpu` (rows only) and of Pallas kernels; None for the backend's own choice.
        max_group_size: Rows of the largest group that `padded` keeps; rows beyond it in a group are zero.
            None for any size, at the cost of G x M rows of work and memory.
        interpret: Run a Pallas kernel in interpret mode, on any platform.
        reverse: Run the tiles of a Pallas kernel last to first: results must not depend on their order.
    """

    backend: str
    tiles: Tiles | None = None
    max_group_size: int | None = None
    interpret: bool = False
    reverse: bool = False

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            hint = nearest(self.backend, BACKENDS)
            raise UserError(f"kernel backend {self.backend}: must be one of {', '.join(BACKENDS)}{hint}")
        if self.tiles is not None and self.backend not in ("cpu", *PALLAS):
            raise UserError(f"kernel tiles: the {self.backend} backend has none; leave them out")
        if self.max_group_size is not None and self.backend != "padded":
            raise UserError(f"kernel max_group_size: the {self.backend} backend has no bound; leave it out")
        if self.max_group_size is not None and self.max_group_size < 1:
            raise UserError(f"kernel max_group_size={self.max_group_size}: must be greater than zero")
        if (self.interpret or self.reverse) and not self.pallas:
            raise UserError(f"kernel interpret, reverse: the {self.backend} backend is not Pallas; leave them out")

    @property
    def pallas(self) -> bool:
        """Whether the kernel is written in Pallas."""
        return self.backend in PALLAS


@dataclass(frozen=True)
class Backends:
    """The kernel of each direction."""

    forward: Kernel
    dgrad: Kernel
    wgrad: Kernel

    @classmethod
    def all(cls, kernel: Kernel | str) -> "Backends":
        """The same kernel in all directions; UserError for anything else."""
        kernel = Kernel(kernel) if isinstance(kernel, str) else kernel
        if not isinstance(kernel, Kernel):
            raise UserError(f"kernel backend {kernel!r}: must be a name, a Kernel or Backends")
        return cls(kernel, kernel, kernel)
