"""Packing and splitting against plain Python loops."""

import numpy as np
import pytest

from moejax.data.packing import KEYS, PackedRows, split_runs
from moejax.errors import UserError

EOD = 256


def stored(docs: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Documents as tokens.bin and documents.bin hold them."""
    tokens = np.array([token for doc in docs for token in [*doc, EOD]], np.uint16)
    return tokens, np.cumsum([len(doc) + 1 for doc in docs]).astype(np.int64)


def random_docs(seed: int, count: int, longest: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def oracle(docs: list[list[int]], length: int, keep: set[int] | None = None) -> list[dict[str, list[int]]]:
    """Rows, one token at a time. `keep` holds the indices of stored tokens that belong to the split."""
    stream, index = [], 0
    for number, doc in enumerate(docs):
        previous = EOD
        for token in [*doc, EOD]:
            if keep is None or index in keep:
                stream.append((previous, token, number))
            previous, index = token, index + 1
    rows = []
    for first in range(0, len(stream), length):
        row: dict[str, list[int]] = {key: [] for key in KEYS}
        segment, position, last = 0, 0, None
        for given, target, number in stream[first : first + length]:
            if number != last:
                segment, position, last = segment + 1, 0, number
            for key, value in zip(KEYS, (given, target, segment, position), strict=True):
                row[key].append(value)
            position += 1
        rows.append({key: values + [0] * (length - len(values)) for key, values in row.items()})
    return rows


def as_lists(rows: PackedRows) -> list[dict[str, list[int]]]:
    return [{key: rows[i][key].tolist() for key in KEYS} for i in range(len(rows))]


@pytest.mark.parametrize("length", [1, 2, 7, 16, 61, 1000])
def test_rows_equal_the_oracle(length: int) -> None:
    docs = random_docs(length, 23, 40)
    tokens, ends = stored(docs)
    rows = PackedRows(tokens, ends, np.array([[0, len(tokens)]]), EOD, length)
    assert as_lists(rows) == oracle(docs, length)


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("docs", [random_docs(1, 57, 30), random_docs(2, 1, 90), random_docs(3, 300, 3)])
def test_rows_of_a_split_equal_the_oracle(split, fraction: float, docs: list[list[int]]) -> None:
    tokens, ends = stored(docs)
    runs = split_runs(ends, split, fraction)
    keep = {i for begin, end in runs.tolist() for i in range(begin, end)}
    rows = PackedRows(tokens, ends, runs, EOD, 13)
    assert rows.num_tokens == len(keep)
    assert as_lists(rows) == oracle(docs, 13, keep)


@pytest.mark.parametrize(("seed", "count", "longest"), [(0, 1, 50), (1, 2, 50), (2, 1000, 7), (3, 40, 400)])
@pytest.mark.parametrize("fraction", [0.001, 0.02, 0.5, 0.95])
def test_splits_share_nothing_and_miss_nothing(seed: int, count: int, longest: int, fraction: float) -> None:
    docs = random_docs(seed, count, longest)
    tokens, ends = stored(docs)
    sides = [split_runs(ends, split, fraction) for split in ("train", "heldout")]
    seen = np.concatenate([np.arange(begin, end) for runs in sides for begin, end in runs])
    assert sorted(seen.tolist()) == list(range(len(tokens)))
    held = sum(end - begin for begin, end in sides[1])
    assert held == max(1, round(fraction * len(tokens)))
    cut = {begin for begin, _ in sides[1].tolist()} - {0, *ends.tolist()}
    assert len(cut) <= 1, "more than one document is cut"


def test_held_out_documents_are_spread_over_the_corpus() -> None:
    ends = np.arange(1, 10_001) * 10
    begins = split_runs(ends, "heldout", 0.1)[:, 0]
    counts = np.histogram(begins, bins=10, range=(0, ends[-1]))[0]
    assert counts.min() > 60, counts  # 100 expected in each tenth
    assert counts.max() < 140, counts


def test_held_out_documents_stay_when_the_share_grows() -> None:
    ends = np.arange(1, 1001) * 10
    small, large = (set(split_runs(ends, "heldout", share)[:, 0].tolist()) for share in (0.05, 0.1))
    assert small < large


def test_too_little_text() -> None:
    with pytest.raises(UserError, match=r"1 tokens are too few to hold out 0\.02"):
        split_runs(np.array([1]), "train", 0.02)


def test_offsets_beyond_int32() -> None:
    """Row numbers times S pass 2**31 in large corpora; a sparse stand-in for the tokens shows the slices asked for."""

    class Huge:
        def __getitem__(self, part: slice) -> np.ndarray:
            return np.arange(part.start, part.stop) % 251

    ends = np.array([3 * 10**9, 6 * 10**9 + 5])
    rows = PackedRows(Huge(), ends, np.array([[0, 6 * 10**9 + 5]]), EOD, 1000)  # pyright: ignore[reportArgumentType]
    row = rows[len(rows) - 1]
    assert row["targets"][:5].tolist() == [i % 251 for i in range(6 * 10**9, 6 * 10**9 + 5)]
    assert row["segments"].tolist() == [1] * 5 + [0] * 995
