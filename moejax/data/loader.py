"""Batches of a split, from text to arrays.

Global batch `step` is rows step * B ... of an endless stream of rows that depends on `config.data` and `run.seed`
alone: each corpus is shuffled anew in every epoch, corpora are interleaved by weight (to about one percent). Any
batch, or any of its rows, can be read directly, so processes and resumed runs need no state.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import grain
import numpy as np

from moejax.config import Config
from moejax.data.corpora import STDLIB
from moejax.data.packing import KEYS, Batch, PackedRows, Split, split_runs
from moejax.data.prepare import make_plan, prepare
from moejax.data.tokenfile import TokenFile, is_token_folder
from moejax.data.tokenizer import Tokenizer, load_tokenizer
from moejax.errors import UserError

_AHEAD = 4  # batches read ahead


class Loader:
    """Batches of one split of the corpora of a run.

    Raw text is tokenized into the cache first; one process does it, others wait.

    Args:
        config: The run; reads `data`, `run.seed`, `run.root` and `model.vocab_size`.
        split: `train` (shuffled, endless) or `heldout` (fixed order, starts again at its end).
        quiet: Show no progress of tokenizing.

    Attributes:
        tokenizer: The tokenizer.
        vocab_size: Its vocabulary, at most `model.vocab_size`.
        token_bytes: int32 [vocab_size], bytes of text of each token.
        fingerprint: Hash of the tokens of all corpora, their weights, the tokenizer and the split.
        num_rows: Rows of one pass over every corpus.

    Raises:
        UserError: Text or tokens cannot be used: see `prepare`, `TokenFile`, `load_tokenizer`.
    """

    def __init__(self, config: Config, split: Split, quiet: bool = False) -> None:
        data = config.data
        self.tokenizer = load_tokenizer(data.tokenizer)
        self.vocab_size = self.tokenizer.vocab_size
        self.token_bytes = self.tokenizer.token_bytes
        if self.vocab_size > config.model.vocab_size:
            raise UserError(
                f"model.vocab_size={config.model.vocab_size}: must be at least {self.vocab_size}, the vocabulary of"
                f" data.tokenizer={data.tokenizer}"
            )
        self.batch_size, self._length = data.batch_size, data.sequence_length
        files = [open_corpus(config, source.corpus, self.tokenizer, quiet) for source in data.sources]
        sources = [self._packed(file, split, data.heldout_fraction) for file in files]
        weights = [source.weight for source in data.sources]
        self.num_rows = sum(map(len, sources))
        self._rows = _stream(sources, weights, config.run.seed if split == "train" else None)
        facts = [[file.manifest.content for file in files], weights, self.tokenizer.hash, data.heldout_fraction, split]
        self.fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def _packed(self, file: TokenFile, split: Split, fraction: float) -> PackedRows:
        runs = split_runs(file.ends, split, fraction)
        return PackedRows(file.tokens, file.ends, runs, self.tokenizer.eod, self._length)

    def batch(self, step: int, rows: Sequence[int] | None = None) -> Batch:
        """Return rows of global batch `step`.

        Args:
            step: Number of the batch, from 0.
            rows: Which of its `data.batch_size` rows, in the order wanted; all if None.

        Returns:
            `tokens`, `targets`, `segments`, `positions`, each int32 [rows, sequence_length].
        """
        rows = range(self.batch_size) if rows is None else rows
        out = {key: np.empty((len(rows), self._length), np.int32) for key in KEYS}
        for to, row in enumerate(rows):
            if not 0 <= row < self.batch_size:
                raise IndexError(f"row {row} of a batch of {self.batch_size}")
            values = self._rows[step * self.batch_size + row]
            assert values is not None
            for key in KEYS:
                out[key][to] = values[key]
        return out

    def batches(self, start_step: int, rows: Sequence[int] | None = None) -> Iterator[Batch]:
        """Yield `batch(start_step, rows)`, `batch(start_step + 1, rows)`, ... without end, read ahead by threads."""
        steps = grain.MapDataset.range(start_step, 2**62).map(lambda step: self.batch(step, rows))
        return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=_AHEAD)))


def open_corpus(config: Config, corpus: str, tokenizer: Tokenizer, quiet: bool = False) -> TokenFile:
    """Open a folder of tokens, or tokenize text into the cache and open that.

    Args:
        config: Reads `data.cache` and `run.root`.
        corpus: As `data.corpus`.
        tokenizer: The tokenizer.
        quiet: Show no progress.
    """
    folder = Path(corpus).expanduser()
    if corpus != STDLIB and is_token_folder(folder):
        file = TokenFile(folder)
        file.require(tokenizer)
        return file
    plan = make_plan([corpus], tokenizer)
    cache = Path(config.data.cache or Path(config.run.root, ".tokens")).expanduser()
    folder = cache / plan.key[:16]
    prepare(plan, folder, tokenizer, quiet=quiet)
    return TokenFile(folder)


def _stream(sources: Sequence[PackedRows], weights: Sequence[float], seed: int | None) -> grain.MapDataset:
    """Endless rows of all sources."""
    parts = []
    for index, source in enumerate(sources):
        part = grain.MapDataset.source(source)
        if seed is not None:
            # The seed of an epoch is this one plus the epoch's number: keep those of sources apart.
            part = part.shuffle(seed=(seed * 0x9E3779B1 + index * 0x85EBCA6B) % 2**32)
        parts.append(part.repeat(reseed_each_epoch=seed is not None))
    return parts[0] if len(parts) == 1 else grain.MapDataset.mix(parts, weights)
