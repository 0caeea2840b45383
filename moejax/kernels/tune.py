"""Measures candidate tiles on this machine and turns the winners into entries of the kernel table."""

from collections.abc import Callable, Iterable
from itertools import pairwise

import jax

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


def _best(case: Case, direction: Direction, backend: str, data: dict, rounds: int, budget: float) -> Tiles:
    kernels = {str(tiles): tiles for tiles in TILES[backend]["wgrad" if direction == "wgrad" else "gmm"]}
    functions: dict[str, Callable] = {
        name: jax.jit(grouped(direction, Backends.all(Kernel(backend, tiles)))) for name, tiles in kernels.items()
    }
    times = timed(functions, data, rounds, budget)
    return kernels[min(times, key=lambda name: times[name])]


def tune(cases: Iterable[Case], backend: str, rounds: int, budget_seconds: float) -> list[Entry]:
    """Best tiles by direction and rows per group.

    A class of rows reaches from its case's rows to the geometric mean with the next case's; the least and the
    largest class are open. Classes with the same winner are one entry.
    """
    ordered = sorted(cases, key=lambda case: case.rows)
    winners: dict[Direction, list[Tiles]] = {direction: [] for direction in DIRECTIONS}  # type: ignore[misc]
    for case in ordered:
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
