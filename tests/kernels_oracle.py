"""NumPy float64 oracle of the grouped matmul, hard group patterns, and the error that the tests bound."""

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike


def gmm(lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[M, K] x [G, K, N] -> [M, N] in float64, zero past the sum."""
    out, row = np.zeros((lhs.shape[0], rhs.shape[2])), 0
    for group, size in enumerate(sizes):
        out[row : row + size] = lhs[row : row + size].astype(np.float64) @ rhs[group].astype(np.float64)
        row += size
    return out


def wgrad(lhs: np.ndarray, grad: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[M, K], [M, N] -> [G, K, N] in float64."""
    out, row = np.zeros((len(sizes), lhs.shape[1], grad.shape[1])), 0
    for group, size in enumerate(sizes):
        out[group] = lhs[row : row + size].astype(np.float64).T @ grad[row : row + size].astype(np.float64)
        row += size
    return out


def patterns(num_rows: int, num_groups: int, tile: int) -> dict[str, np.ndarray]:
    """Group sizes that break careless kernels, by name; `tile` is the row tile of the kernel under test."""
    rng = np.random.default_rng(0)
    m, g = num_rows, num_groups
    even = np.full(g, m // g)
    even[: m % g] += 1
    skewed = rng.multinomial(m, rng.dirichlet(np.full(g, 0.3)))
    alternate = rng.multinomial(m // 2, np.full(g, 1 / g))
    alternate[::2] = 0
    found = {
        "even": even,
        "one hot first": m * np.eye(1, g, 0)[0],
        "one hot last": m * np.eye(1, g, g - 1)[0],
        "all zero": np.zeros(g),
        "single row": np.eye(1, g, g // 2)[0],
        "ones": np.full(g, 1 if g <= m else 0),
        "skewed": skewed,
        "ragged tail": rng.multinomial(m * 3 // 5, rng.dirichlet(np.ones(g))),
        "sum one short": rng.multinomial(m - 1, np.full(g, 1 / g)),
        "every other empty": alternate,
        "whole tiles": _fill(m, g, [tile]),
        "tiles and one more or less": _fill(m, g, [tile - 1, tile + 1, 1, 0, 2 * tile + 3]),
        "most tiles": _most_tiles(m, g, tile),
        "first and last": _first_and_last(m, g, tile),
    }
    return {name: sizes.astype(np.int32) for name, sizes in found.items()}


def _fill(num_rows: int, num_groups: int, wanted: list[int]) -> np.ndarray:
    sizes, left = np.zeros(num_groups), num_rows
    for group in range(num_groups):
        sizes[group] = min(left, wanted[group % len(wanted)])
        left -= int(sizes[group])
    return sizes


def _most_tiles(num_rows: int, num_groups: int, tile: int) -> np.ndarray:
    """Every group ends one row into a tile, as far as the rows go: the longest tile table."""
    sizes = np.zeros(num_groups)
    sizes[: min(num_groups, num_rows)] = 1
    left = num_rows - int(sizes.sum())
    sizes[0] += left - left % tile
    return sizes


def _first_and_last(num_rows: int, num_groups: int, tile: int) -> np.ndarray:
    sizes = np.zeros(num_groups)
    sizes[0] = min(tile // 2, num_rows)
    sizes[-1] += num_rows - sizes[0]
    return sizes


def round_to(array: np.ndarray, dtype: str) -> np.ndarray:
    """`array` rounded to float32 or bfloat16."""
    return array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)


def row_slices(sizes: np.ndarray) -> list[slice]:
    """Rows of each group."""
    ends = np.cumsum(sizes)
    return [slice(int(end - size), int(end)) for end, size in zip(ends, sizes, strict=True)]


def relative_error(got: ArrayLike, want: ArrayLike) -> float:
    """Relative Frobenius error; infinite for any NaN; absolute where the truth is zero."""
    got = np.asarray(got).astype(np.float64)
    if not np.isfinite(got).all():
        return float("inf")
    want = np.asarray(want, np.float64)
    norm = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / (norm if norm > 0 else 1.0))


def worst_row_group(got: np.ndarray, want: np.ndarray, sizes: np.ndarray) -> float:
    """Largest relative error of one group's rows. Asserts that rows past the sum are exactly zero."""
    tail = np.asarray(got)[int(sizes.sum()) :].astype(np.float64)
    assert (tail == 0).all(), "rows past the sum are not exactly zero"
    return max(relative_error(np.asarray(got)[rows], want[rows]) for rows in row_slices(sizes))


def worst_weight_group(got: np.ndarray, want: np.ndarray, sizes: np.ndarray) -> float:
    """Largest relative error of one group's weight gradient. Asserts that empty groups are exactly zero."""
    got = np.asarray(got)
    assert (got[sizes == 0].astype(np.float64) == 0).all(), "an empty group's gradient is not exactly zero"
    return max(relative_error(got[group], want[group]) for group in range(len(sizes)))
