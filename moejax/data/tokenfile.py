"""A folder of tokens: tokens.bin, documents.bin, manifest.json.

tokens.bin     little-endian uint16 or uint32 [tokens]: the documents one after the other, each followed by the
               tokenizer's end-of-document token
documents.bin  little-endian int64 [documents]: where each document ends in tokens.bin, in tokens
manifest.json  written last: a folder without it is not finished
tokenizer.json, tokenizer_config.json   a copy of the tokenizer, unless it is `byte`
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_type_hints

import numpy as np

from moejax.data.tokenizer import Tokenizer
from moejax.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
_SAMPLES, _SAMPLE = 64, 2**20


def is_token_folder(folder: Path) -> bool:
    """Return whether `folder` holds tokens, or the beginnings of them, and not text."""
    return any((folder / name).exists() for name in ("tokens.bin", "documents.bin", ".partial"))


@dataclass(frozen=True)
class Manifest:
    """What a folder of tokens holds.

    Args:
        format: Version of this layout.
        plan: Hash of the sources (paths, sizes, times of change), the tokenizer and this layout.
        tokenizer: Name of the tokenizer that made the tokens.
        tokenizer_hash: Its `Tokenizer.hash`.
        vocab_size: Its vocabulary.
        dtype: NumPy type of tokens.bin.
        files: Files read.
        documents: Documents kept.
        tokens: Tokens, end-of-document tokens included.
        text_bytes: UTF-8 bytes of the documents.
        undecodable: Documents of text files that were left out because they are not UTF-8.
        content: SHA-256 of all tokens and document ends.
        checksums: File name to `checksum` of that file.
    """

    format: int
    plan: str
    tokenizer: str
    tokenizer_hash: str
    vocab_size: int
    dtype: str
    files: int
    documents: int
    tokens: int
    text_bytes: int
    undecodable: int
    content: str
    checksums: dict[str, str]

    def to_json(self) -> str:
        """Return the text of manifest.json."""
        return json.dumps(asdict(self), indent=2) + "\n"


_TYPES = get_type_hints(Manifest) | {"checksums": dict}


def read_manifest(folder: Path) -> Manifest:
    """Read manifest.json of `folder`.

    Raises:
        UserError: There is none, it is damaged, or it is of another format.
    """
    file = folder / MANIFEST
    try:
        values = json.loads(file.read_text("utf-8"))
        if values["format"] != FORMAT:
            raise UserError(
                f"{folder}: tokens of format {values['format']}, but this version reads {FORMAT}; prepare them again"
            )
        manifest = Manifest(**values)
        if any(type(value) is not _TYPES[name] for name, value in asdict(manifest).items()):
            raise TypeError("a value of the wrong type")
        np.dtype(manifest.dtype)
    except FileNotFoundError:
        raise UserError(
            f"{folder}: has no {MANIFEST}, so its preparation did not finish; run `moejax data prepare` again"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: damaged ({error}); delete {folder} and prepare it again") from error
    return manifest


def checksum(file: Path) -> str:
    """SHA-256 of a file, or of 64 samples of 1 MiB spread evenly from its first to its last byte if it is longer."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        size = stream.seek(0, 2)
        for begin in _sample_starts(size):
            stream.seek(begin)
            digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()


def _sample_starts(size: int) -> Iterator[int]:
    if size <= _SAMPLES * _SAMPLE:
        yield from range(0, size, _SAMPLE)
    else:
        yield from (i * (size - _SAMPLE) // (_SAMPLES - 1) for i in range(_SAMPLES))


class TokenFile:
    """A folder of tokens, checked and mapped into memory.

    Args:
        folder: Folder made by `moejax data prepare`.

    Attributes:
        manifest: What the folder says about itself.
        tokens: uint16 or uint32 [tokens], read only.
        ends: int64 [documents], where each document ends in `tokens`; read only.

    Raises:
        UserError: The folder is not finished, or a file is missing, cut off or changed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self.manifest = read_manifest(self.folder)
        self.tokens = self._map("tokens.bin", np.dtype(self.manifest.dtype), self.manifest.tokens)
        self.ends = self._map("documents.bin", np.dtype("<i8"), self.manifest.documents)
        if len(self.ends) == 0 or self.ends[-1] != self.manifest.tokens:
            raise UserError(
                f"{self.folder}: documents.bin does not fit tokens.bin; delete the folder and prepare it again"
            )

    def require(self, tokenizer: Tokenizer) -> None:
        """Raise UserError unless `tokenizer` made these tokens."""
        if tokenizer.hash != self.manifest.tokenizer_hash:
            own = self.folder / "tokenizer.json"
            name = str(own) if own.exists() else self.manifest.tokenizer
            raise UserError(
                f"{self.folder}: prepared with another tokenizer than data.tokenizer={tokenizer.name};"
                f" set data.tokenizer={name}, or prepare the text again"
            )

    def _map(self, name: str, dtype: np.dtype, count: int) -> np.ndarray:
        file, want = self.folder / name, count * dtype.itemsize
        again = f"delete {self.folder} and prepare it again"
        try:
            size = file.stat().st_size
            if size != want:
                raise UserError(
                    f"{file}: has {size} bytes where the manifest says {want}, so it was cut off or changed; {again}"
                )
            if checksum(file) != self.manifest.checksums.get(name):
                raise UserError(f"{file}: is damaged, its checksum differs from the manifest's; {again}")
            return np.asarray(np.memmap(file, dtype, mode="r", shape=(count,)))  # slices of a plain array are quicker
        except FileNotFoundError:
            raise UserError(f"{file}: is missing; {again}") from None
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror or error})") from error
