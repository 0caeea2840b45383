"""Documents to rows of a fixed length: concatenate the documents of a split, cut every S tokens.

The stream of a split has one position per stored token, which is that position's *target*; its *input* is the token
before it in the file, and the first input of a document is the end-of-document token. So every token of the split
is a target exactly once per epoch, and a document that crosses into the next row goes on there with its last token
as the first input. Attention cannot see the row before, so `positions` start again from 0 there.
"""

from typing import Literal

import numpy as np

from moejax.errors import UserError

Batch = dict[str, np.ndarray]
Split = Literal["train", "heldout"]
KEYS = ("tokens", "targets", "segments", "positions")
_CHUNK = 2**20  # documents hashed at a time


def split_runs(ends_N: np.ndarray, split: Split, fraction: float) -> np.ndarray:
    """Divide documents into training and held-out text.

    Held-out are the documents that come first in a fixed pseudo-random order of their indices, until `fraction` of
    all tokens is reached; the last one is cut, and its tail held out, so that the share is exact even where a corpus
    is a single document.

    Args:
        ends_N: int64, where each document ends, in tokens.
        split: Which side to return.
        fraction: Share of tokens held out.

    Returns:
        int64 [runs, 2]: begin and end, in tokens, of each unbroken run of the split, in file order.

    Raises:
        UserError: Either side would have no token.
    """
    total = int(ends_N[-1])
    budget = max(1, round(fraction * total))
    if budget >= total:
        raise UserError(f"data.corpus: {total} tokens are too few to hold out {fraction} of them; give more text")
    held_H2 = _held_out(ends_N, budget, fraction)
    if split == "heldout":
        return held_H2
    edges = np.concatenate([[0], held_H2.ravel(), [total]]).astype(np.int64).reshape(-1, 2)
    return edges[edges[:, 0] < edges[:, 1]]


def _held_out(ends_N: np.ndarray, budget: int, fraction: float) -> np.ndarray:
    """Runs of exactly `budget` tokens, in file order."""
    share = min(1.0, 2 * fraction)
    while True:
        index, key = _lowest_keys(len(ends_N), share)
        index = index[np.argsort(key, kind="stable")]
        begin = np.where(index > 0, ends_N[index - 1], 0)
        sizes = ends_N[index] - begin
        reached = np.cumsum(sizes)
        if share == 1.0 or (len(reached) and reached[-1] >= budget):
            break
        share = min(1.0, 2 * share)
    last = int(np.searchsorted(reached, budget))
    begin, end = begin[: last + 1], ends_N[index[: last + 1]]
    begin[last] += reached[last] - budget
    return np.stack([begin, end], axis=1)[np.argsort(begin)].astype(np.int64)


def _lowest_keys(count: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Indices below `count` whose hash is in the lowest `share` of uint64, and the hashes."""
    limit = np.uint64(min(int(share * 2.0**64), 2**64 - 1))
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for first in range(0, count, _CHUNK):
        index = np.arange(first, min(first + _CHUNK, count))
        key = _mix(index.astype(np.uint64))
        found.append((index[key <= limit], key[key <= limit]))
    return np.concatenate([i for i, _ in found]), np.concatenate([k for _, k in found])


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), which spreads consecutive numbers over all of uint64."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class PackedRows:
    """Random access to the rows of one epoch of a split, each a dict of int32 [S] arrays named `KEYS`.

    Args:
        tokens_T: Stored tokens, each document followed by `eod`.
        ends_N: int64, where each document ends.
        runs_R2: Begin and end of the runs of the split, from `split_runs`.
        eod: End-of-document token.
        length: Tokens per row S.
    """

    def __init__(self, tokens_T: np.ndarray, ends_N: np.ndarray, runs_R2: np.ndarray, eod: int, length: int) -> None:
        self._tokens_T, self._ends_N, self._eod, self._length = tokens_T, ends_N, eod, length
        self._runs_R2 = runs_R2
        self._stream_R = np.concatenate([[0], np.cumsum(runs_R2[:, 1] - runs_R2[:, 0])]).astype(np.int64)

    @property
    def num_tokens(self) -> int:
        """Targets of one epoch."""
        return int(self._stream_R[-1])

    def __len__(self) -> int:
        return -(-self.num_tokens // self._length)

    def __repr__(self) -> str:
        return f"PackedRows({len(self)} rows of {self._length} tokens)"

    def __getitem__(self, index: int) -> Batch:
        S = self._length
        out = {key: np.zeros(S, np.int32) for key in KEYS}
        stream = index * S
        size = min(S, self.num_tokens - stream)
        run = int(np.searchsorted(self._stream_R, stream, side="right")) - 1
        starts_S = np.zeros(S, bool)
        done = 0
        while done < size:
            begin = int(self._runs_R2[run, 0]) + stream + done - int(self._stream_R[run])
            end = min(begin + size - done, int(self._runs_R2[run, 1]))
            self._copy(out, starts_S, slice(done, done + end - begin), begin, end)
            done += end - begin
            run += 1
        segments_s = np.cumsum(starts_S[:size])
        range_s = np.arange(size)
        out["segments"][:size] = segments_s
        out["positions"][:size] = range_s - range_s[starts_S[:size]][segments_s - 1]
        return out

    def _copy(self, out: Batch, starts_S: np.ndarray, to: slice, begin: int, end: int) -> None:
        """Copy stored tokens [begin, end) of one run, and mark where documents start."""
        out["targets"][to] = self._tokens_T[begin:end]
        if begin:
            out["tokens"][to] = self._tokens_T[begin - 1 : end - 1]
        else:
            out["tokens"][0] = self._eod
            out["tokens"][to.start + 1 : to.stop] = self._tokens_T[: end - 1]
        first, last = np.searchsorted(self._ends_N, (begin, end))
        starts_S[to.start] = True
        starts_S[self._ends_N[first:last] - begin + to.start] = True
