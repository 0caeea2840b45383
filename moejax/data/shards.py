"""One part of a preparation: read pieces, write a shard. Also runs as `python -m moejax.data.shards FOLDER INDEX`.

A shard is three files in the folder of its plan: NAME.tokens, NAME.documents (as in a folder of tokens, counted from
the shard's start), and NAME.json, which is renamed into place last: a shard without it is made again.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from moejax.data.corpora import Piece, read_documents
from moejax.data.tokenizer import Tokenizer, load_tokenizer
from moejax.errors import UserError
from moejax.files import readable_errors, replacing

_BATCH = 2**21  # characters of text encoded at a time


@dataclass(frozen=True)
class Shard:
    """Counts of a finished shard: see `Manifest`."""

    tokens: int
    documents: int
    text_bytes: int
    undecodable: int


def shard_files(folder: Path, index: int) -> tuple[Path, Path, Path]:
    """Return the token, document and count files of shard `index`."""
    return folder / f"{index:06d}.tokens", folder / f"{index:06d}.documents", folder / f"{index:06d}.json"


def read_shard(folder: Path, index: int, tokenizer: Tokenizer) -> Shard | None:
    """Return the counts of a shard if it is finished, else None."""
    tokens, documents, counts = shard_files(folder, index)
    try:
        shard = Shard(**json.loads(counts.read_text("utf-8")))
        sizes = tokens.stat().st_size, documents.stat().st_size
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return shard if sizes == (shard.tokens * tokenizer.dtype.itemsize, shard.documents * 8) else None


def write_shard(
    folder: Path, index: int, pieces: Sequence[Piece], tokenizer: Tokenizer, progress: Callable[[int], None]
) -> Shard:
    """Tokenize `pieces` into shard `index` of `folder`.

    Args:
        folder: Folder of the plan.
        index: Number of the shard.
        pieces: What to read, in order.
        tokenizer: The tokenizer.
        progress: Called with the number of text bytes done so far.
    """
    skipped: Counter[str] = Counter()
    total = documents = text_bytes = 0
    tokens_file, documents_file, counts_file = shard_files(folder, index)
    with replacing(tokens_file) as tokens_out, replacing(documents_file) as documents_out:
        for texts in _batches(pieces, skipped):
            tokens_n, lengths = tokenizer.encode_documents(texts)
            tokens_out.write(tokens_n.tobytes())
            documents_out.write((total + np.cumsum(lengths)).astype("<i8").tobytes())
            size = sum(len(text) if text.isascii() else len(text.encode("utf-8")) for text in texts)
            total, documents, text_bytes = total + len(tokens_n), documents + len(texts), text_bytes + size
            progress(text_bytes)
    shard = Shard(total, documents, text_bytes, skipped["undecodable"])
    with replacing(counts_file) as out:
        out.write(json.dumps(asdict(shard)).encode())
    return shard


def _batches(pieces: Sequence[Piece], skipped: Counter[str]) -> Iterator[list[str]]:
    texts: list[str] = []
    size = 0
    for piece in pieces:
        for text in read_documents(piece, skipped):
            texts.append(text)
            size += len(text)
            if size >= _BATCH:
                yield texts
                texts, size = [], 0
    if texts:
        yield texts


def main(folder: str, index: str) -> int:
    """Make one shard of the plan in `folder`; return the exit code, 2 with a line on standard error for bad input."""
    partial = Path(folder)
    try:
        with readable_errors(partial):
            plan = json.loads((partial / "plan.json").read_text("utf-8"))
            tokenizer = load_tokenizer(plan["tokenizer"])
            pieces = [Piece(*piece) for piece in plan["shards"][int(index)]]
            write_shard(partial, int(index), pieces, tokenizer, lambda _: None)
    except UserError as error:
        print(error, file=sys.stderr)  # noqa: T201 the parent reads it
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
