"""Measures candidate tiles on this machine and turns the winners into entries of the kernel table."""

import math
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import jax

from moejax.errors import UserError
from moejax.kernels.bench import Case, grouped, operands, timed
from moejax.kernels.kernel import DIRECTIONS, Backends, Direction, Kernel, Tiles
from moejax.kernels.table import Entry

TILES: dict[str, dict[str, tuple[Tiles, ...]]] = {
    "cpu": {"gmm": tuple(Tiles(rows=r) for r in (8, 16, 32)), "wgrad": tuple(Tiles(rows=r) for r in (8, 16, 32))},
    "gpu": {
        "gmm": (
            Tiles(64, 128, 64, 4, 3),
            Tiles(64, 256, 64, 8, 3),
            Tiles(128, 128, 64, 4, 4),
            Tiles(128, 128, 64, 8, 3),
            Tiles(128, 128, 128, 8, 2),
            Tiles(128, 256, 64, 8, 3),
            Tiles(128, 256, 64, 8, 4),
        ),
        "wgrad": (
            Tiles(32, 128, 128, 8, 4),
            Tiles(64, 128, 128, 4, 4),
            Tiles(64, 128, 128, 8, 3),
            Tiles(64, 256, 128, 8, 3),
            Tiles(128, 128, 128, 8, 2),
        ),
    },
    "mosaic": {
        "gmm": (
            Tiles(64, 128, 64, stages=4),
            Tiles(64, 256, 64, stages=4),
            Tiles(128, 128, 64, stages=5),
            Tiles(128, 256, 64, stages=3),
            Tiles(128, 256, 64, stages=4),
        ),
        "wgrad": (Tiles(64, 128, 128, stages=5), Tiles(64, 256, 128, stages=3), Tiles(128, 128, 128, stages=3)),
    },
    "tpu": {
        "gmm": (Tiles(256, 512, 1024), Tiles(512, 512, 1024), Tiles(512, 1024, 512), Tiles(512, 1024, 1024)),
        "wgrad": (Tiles(256, 512, 512), Tiles(512, 512, 512), Tiles(512, 512, 1024), Tiles(512, 1024, 1024)),
    },
}
"""Candidates by backend; those that do not compile on a chip drop out."""


def _compiled(kernels: Iterable[Tiles], direction: Direction, backend: str, data: dict) -> dict[str, Callable]:
    """Programs of all candidates that compile, on all cores; a warning names the others."""

    def one(tiles: Tiles) -> Callable | Exception:
        function = grouped(direction, Backends.all(Kernel(backend, tiles)))
        try:
            return jax.jit(function).lower(data).compile()
        except Exception as error:  # tiles may not fit a chip
            return error

    tried = list(kernels)
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(one, tried))
    found: dict[str, Callable] = {}
    for tiles, result in zip(tried, results, strict=True):
        if isinstance(result, Exception):
            warnings.warn(f"{tiles} is left out: {type(result).__name__}: {str(result)[:300]}", stacklevel=2)
        else:
            found[str(tiles)] = result
    return found


def _best(case: Case, direction: Direction, backend: str, data: dict, rounds: int, budget: float) -> Tiles:
    kernels = {str(tiles): tiles for tiles in TILES[backend]["wgrad" if direction == "wgrad" else "gmm"]}
    times = timed(_compiled(kernels.values(), direction, backend, data), data, rounds, budget)
    if not times:
        raise UserError(f"none of the tiles of {backend} runs in {direction} for {case.rows} rows per expert")
    return kernels[min(times, key=lambda name: times[name])]


def tune(
    cases: Iterable[Case], backend: str, rounds: int, budget_seconds: float, deadline: float = math.inf
) -> list[Entry]:
    """Best tiles by direction and rows per group.

    A class of rows reaches from its case's rows to the geometric mean with the next case's; the least and the
    largest class are open. Classes with the same winner are one entry. No case but the first is begun after
    `deadline` (`time.monotonic`).
    """
    ordered: list[Case] = []
    winners: dict[Direction, list[Tiles]] = {direction: [] for direction in DIRECTIONS}  # type: ignore[misc]
    for case in sorted(cases, key=lambda case: case.rows):
        if ordered and time.monotonic() > deadline:
            break
        ordered.append(case)
        data = operands(case)
        for direction, found in winners.items():
            found.append(_best(case, direction, backend, data, rounds, budget_seconds))
    edges = [None, *((a.rows * b.rows) ** 0.5 for a, b in pairwise(ordered)), None]
    chip = jax.devices()[0].device_kind
    first = ordered[0]
    source = f"measured on {chip}, jax {jax.__version__}, G {first.groups}, K {first.width}, N {2 * first.hidden}"
    entries = []
    for direction, found in winners.items():
        start = 0
        for stop in range(1, len(found) + 1):
            if stop == len(found) or found[stop] != found[start]:
                low, high = edges[start], edges[stop]
                entries.append(
                    Entry(chip, backend, direction, first.dtype, low, high, tiles=found[start], source=source)
                )
                start = stop
    return entries
