"""Which kernel is best where: a table of measurements, shipped as JSON and extended by users.

An entry names a chip (a device kind, or a platform for all its chips), a direction, a type, and the shapes it
was measured on; the first entry that fits wins. Entries of the file in MOEJAX_KERNEL_TABLE come first, and
`moejax bench kernels --tune` writes such a file.
"""

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

import jax
from jax.typing import DTypeLike

from moejax.errors import UserError
from moejax.kernels.kernel import DIRECTIONS, Backends, Direction, Kernel, Tiles

ENVIRONMENT = "MOEJAX_KERNEL_TABLE"

_TARGET: ContextVar[tuple[str, str] | None] = ContextVar("kernel target", default=None)


@dataclass(frozen=True)
class Entry:
    """One line of the table. Ranges are inclusive; None is open.

    Args:
        chip: Device kind as JAX names it ("NVIDIA H200", "TPU v5"), or a platform ("cpu", "gpu", "tpu").
        backend: Backend that was best.
        direction: `forward`, `dgrad` or `wgrad`; None for all.
        dtype: Type of the operands; None for all.
        min_rows: Least rows of the buffer per group, M / G.
        max_rows: Most rows per group.
        bounded: Only where the caller bounds the size of a group (`padded` needs it).
        tiles: Tiles of the kernel; None for the backend's own.
        source: What the entry rests on.
    """

    chip: str
    backend: str
    direction: Direction | None = None
    dtype: str | None = None
    min_rows: float | None = None
    max_rows: float | None = None
    bounded: bool = False
    tiles: Tiles | None = None
    source: str = ""

    def __post_init__(self) -> None:
        Kernel(self.backend, self.tiles)  # refuses what cannot be
        if self.direction not in (None, *DIRECTIONS):
            raise UserError(f"direction {self.direction}: must be one of {', '.join(DIRECTIONS)}")

    def fits(self, chips: tuple[str, str], direction: str, dtype: str, rows: float, bounded: bool) -> bool:
        """Whether the entry speaks about this use."""
        return (
            self.chip in chips
            and self.direction in (None, direction)
            and self.dtype in (None, dtype)
            and (self.min_rows is None or rows >= self.min_rows)
            and (self.max_rows is None or rows <= self.max_rows)
            and (bounded or not self.bounded)
        )


def parse(text: str, source: str) -> tuple[Entry, ...]:
    """Entries of a JSON table; UserError names `source` if it is not one."""
    try:
        raw = json.loads(text)["entries"]
        return tuple(
            Entry(**{**entry, "tiles": Tiles(**entry["tiles"]) if entry.get("tiles") else None}) for entry in raw
        )
    except (ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        raise UserError(f"kernel table {source}: {error}; write one with `moejax bench kernels --tune`") from error


def dump(entries: list[Entry]) -> str:
    """JSON text of `entries`, without the fields that are left open."""
    raw = [{key: value for key, value in asdict(entry).items() if value not in (None, False, "")} for entry in entries]
    return json.dumps({"entries": raw}, indent=1) + "\n"


@functools.lru_cache
def entries(path: str | None) -> tuple[Entry, ...]:
    """The user's entries at `path`, then the shipped ones."""
    shipped = parse(resources.files("moejax.kernels").joinpath("table.json").read_text(), "table.json")
    if path is None:
        return shipped
    try:
        return parse(Path(path).read_text(), path) + shipped
    except OSError as error:
        raise UserError(f"{ENVIRONMENT}={path}: {error.strerror}; name a readable file or unset it") from error


@contextlib.contextmanager
def target(platform: str, chip: str) -> Iterator[None]:
    """Choose kernels for a machine that is not this one, while tracing for its compiler.

    Args:
        platform: `cpu`, `gpu` or `tpu`.
        chip: Its device kind, as `jax.Device.device_kind`.
    """
    token = _TARGET.set((chip, platform))
    try:
        yield
    finally:
        _TARGET.reset(token)


def chips() -> tuple[str, str]:
    """Device kind and platform that kernels are chosen for."""
    chosen = _TARGET.get()
    return chosen or (jax.devices()[0].device_kind, jax.default_backend())


def choose(
    direction: Direction, dtype: DTypeLike, num_rows: int, num_groups: int, max_group_size: int | None
) -> Kernel:
    """The table's kernel for one direction of a grouped matmul of M rows and G groups."""
    where, rows = chips(), num_rows / max(num_groups, 1)
    for entry in entries(os.environ.get(ENVIRONMENT)):
        if entry.fits(where, direction, jax.numpy.dtype(dtype).name, rows, max_group_size is not None):
            bound = max_group_size if entry.backend == "padded" else None
            return Kernel(entry.backend, entry.tiles, bound)
    return Kernel("xla")


def choose_all(dtype: DTypeLike, num_rows: int, num_groups: int, max_group_size: int | None) -> Backends:
    """The table's kernels for all directions."""
    return Backends(*(choose(d, dtype, num_rows, num_groups, max_group_size) for d in DIRECTIONS))


def backends(
    given: str | Kernel | Backends | None,
    dtype: DTypeLike,
    num_rows: int,
    num_groups: int,
    max_group_size: int | None = None,
) -> Backends:
    """The kernels of all directions: those that the caller gives, or the table's. UserError if one cannot run here."""
    if given is None:
        return choose_all(dtype, num_rows, num_groups, max_group_size)
    found, platform = given if isinstance(given, Backends) else Backends.all(given), chips()[1]
    for kernel in (found.forward, found.dgrad, found.wgrad):
        if kernel.backend in ("gpu", "tpu") and kernel.backend != platform and not kernel.interpret:
            raise UserError(f"kernel backend {kernel.backend}: does not run on {platform}; leave it to the table")
    return found
