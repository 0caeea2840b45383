"""Where text lies and how it is read: files to pieces, pieces to documents.

A *piece* is a file, or a range of bytes of a large uncompressed one; it is what one worker reads at a time.
A *document* is a line of .jsonl, a row of .parquet, or a text file. Text files over `BLOCK` bytes become several
documents, cut at line ends, so that memory stays small and a corpus of one long file can be shuffled.
"""

import glob
import gzip
import io
import json
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from moejax.data.tokenfile import is_token_folder
from moejax.errors import UserError

STDLIB = "stdlib"
BLOCK = 2**20  # bytes of a document cut from a long text file, about
PIECE = 2**26  # bytes of a piece of a large uncompressed file
_KINDS = (".txt", ".jsonl", ".parquet")
_PACKED = (".gz", ".zst")
# Tests of the standard library are half of its bytes, and some systems leave them out.
_STDLIB_SKIP = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Piece:
    """Bytes [begin, end) of a file: the documents whose first byte lies there. `end` is None for a whole file."""

    path: str
    begin: int = 0
    end: int | None = None


def find_files(sources: Sequence[str]) -> list[Path]:
    """Return the files of `sources` in a fixed order, without duplicates.

    Args:
        sources: Each `stdlib`, a file, a glob, or a folder. In a folder, files with known endings are taken at any
            depth; a file or glob may have any ending, and unknown ones are read as plain text.

    Raises:
        UserError: A source matches no file, or is already a folder of tokens.
    """
    found: dict[Path, None] = {}
    for source in sources:
        files = list(_stdlib_files()) if source == STDLIB else _match(source)
        found.update(dict.fromkeys(sorted(files)))
    return list(found)


def find_pieces(files: Iterable[Path]) -> list[Piece]:
    """Cut files into pieces; only .txt, .jsonl and unknown endings can be cut."""
    pieces = []
    for file in files:
        size = file.stat().st_size
        if size > PIECE and file.suffix not in (".parquet", *_PACKED):
            pieces += [Piece(str(file), begin, min(begin + PIECE, size)) for begin in range(0, size, PIECE)]
        else:
            pieces.append(Piece(str(file)))
    return pieces


def read_documents(piece: Piece, skipped: Counter[str]) -> Iterator[str]:
    """Yield the documents of `piece`, in order. Empty ones are left out.

    Args:
        piece: What to read.
        skipped: `skipped["undecodable"]` counts documents of text files that are not UTF-8.

    Raises:
        UserError: The file cannot be read, is cut off, or has a line or row without a string `text`.
    """
    suffixes = Path(piece.path).suffixes
    kind = suffixes[-2] if suffixes[-1:] and suffixes[-1] in _PACKED and len(suffixes) > 1 else "".join(suffixes[-1:])
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    for text in readers.get(kind, _read_text)(piece, skipped):
        if text:
            # json lets through halves of surrogate pairs, which are no Unicode text.
            yield text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _stdlib_files() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIP]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _match(source: str) -> list[Path]:
    path = Path(source).expanduser()
    endings = tuple(
        kind + packed for kind in _KINDS for packed in ("", *_PACKED) if not (packed and kind == ".parquet")
    )
    if path.is_file():
        return [path]
    if path.is_dir():
        if is_token_folder(path):
            raise UserError(f"{source}: already holds tokens; give the text that they were made from")
        files = [file for file in path.rglob("*") if file.is_file() and file.name.endswith(endings)]
        if not files:
            raise UserError(
                f"{source}: no file that ends in {', '.join(endings)}; for other text files give a glob, such as"
                f" '{source}/**/*.md'"
            )
        return files
    files = [Path(file) for file in glob.glob(str(path), recursive=True) if os.path.isfile(file)]
    if not files:
        raise UserError(f"{source}: no such file or folder; give a file, a folder, a glob, or 'stdlib'")
    return files


@contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, unpacked; damaged files become a UserError."""
    try:
        if path.endswith(".gz"):
            with gzip.open(path, "rb") as file:
                yield file  # pyright: ignore[reportReturnType]
        elif path.endswith(".zst"):
            with _open_zst(path) as file:
                yield file
        else:
            with open(path, "rb") as file:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: damaged or cut off ({error}); fetch it again") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error


def _open_zst(path: str) -> IO[bytes]:
    try:
        from moejax.data.zst import ZstReader
    except ImportError:
        raise UserError(f"{path}: reading .zst needs zstandard; pip install 'moejax[data]'") from None
    return io.BufferedReader(ZstReader(path))


def _blocks(file: IO[bytes], piece: Piece, hint: int) -> Iterator[list[bytes]]:
    """Yield lists of lines, about `hint` bytes each, of lines that begin inside the piece."""
    position = piece.begin
    if position:
        file.seek(position - 1)
        position += len(file.readline()) - 1
    end = piece.end
    while end is None or position < end:
        room = hint if end is None else min(hint, end - position)
        lines, size = [], 0
        # Not readlines(room): it takes one line more when the sizes come out even.
        while size < room and (line := file.readline()):
            lines.append(line)
            size += len(line)
        if not lines:
            return
        position += size
        yield lines


def _read_text(piece: Piece, skipped: Counter[str]) -> Iterator[str]:
    with _open(piece.path) as file:
        for lines in _blocks(file, piece, BLOCK):
            try:
                yield b"".join(lines).decode("utf-8")
            except UnicodeDecodeError:
                skipped["undecodable"] += 1


def _read_jsonl(piece: Piece, skipped: Counter[str]) -> Iterator[str]:
    count = 0
    with _open(piece.path) as file:
        for lines in _blocks(file, piece, BLOCK):
            for line in lines:
                count += 1
                if line.strip():
                    yield _text_of(line, piece, count)


def _text_of(line: bytes, piece: Piece, count: int) -> str:
    where = f"{piece.path}:{count}" if not piece.begin else f"{piece.path}, line {count} after byte {piece.begin}"
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not a line of JSON ({error}); repair or remove it") from error
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{where}: no string field 'text'; each line must be an object with one")
    return text


def _read_parquet(piece: Piece, skipped: Counter[str]) -> Iterator[str]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(f"{piece.path}: reading .parquet needs pyarrow; pip install 'moejax[data]'") from None
    try:
        with parquet.ParquetFile(piece.path) as file:
            columns = dict(zip(file.schema_arrow.names, map(str, file.schema_arrow.types), strict=True))
            if columns.get("text") not in ("string", "large_string"):
                raise UserError(f"{piece.path}: no string column 'text'; columns are {', '.join(columns)}")
            for batch in file.iter_batches(batch_size=1024, columns=["text"]):
                yield from (text for text in batch.column(0).to_pylist() if text)
    except (ArrowException, OSError) as error:
        raise UserError(f"{piece.path}: cannot be read as .parquet ({error})") from error
