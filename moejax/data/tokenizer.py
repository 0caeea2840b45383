"""Tokenizers: bytes, or any tokenizer.json read by Hugging Face `tokenizers`."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from moejax.errors import UserError

BYTE_EOD = 256
EOD_NAME = "<|endoftext|>"
SMALLEST_BPE = 257
# What published tokenizers call the token that ends a document, where no tokenizer_config.json says.
_EOD_NAMES = (EOD_NAME, "<|end_of_text|>", "<|endofdocument|>", "<eos>", "</s>", "<eod>", "[SEP]")


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        name: What `data.tokenizer` said: `byte` or a path.
        hash: SHA-256 of everything that decides the ids; equal hashes give equal ids.
        vocab_size: Largest id plus one.
        eod: Id of the end-of-document token.
        token_bytes: int32 [vocab_size], bytes of text that each id stands for; 0 for control tokens.
    """

    name: str
    hash: str
    vocab_size: int
    eod: int
    token_bytes: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """Type of stored tokens, little-endian: uint16 where the vocabulary fits, else uint32."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    @abstractmethod
    def encode_documents(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode documents, each followed by the end-of-document token.

        Returns:
            tokens: `dtype` [n], all documents one after the other.
            lengths: int64 [len(texts)], tokens of each document, its end-of-document token included.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; control tokens are left out, bytes that are no UTF-8 become U+FFFD."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without an end-of-document token."""
        return self.encode_documents([text])[0][:-1].tolist()


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of UTF-8 text, 256 ends a document."""

    def __init__(self) -> None:
        self.name = "byte"
        self.hash = hashlib.sha256(b"moejax byte tokenizer, 256 ends a document").hexdigest()
        self.vocab_size = BYTE_EOD + 1
        self.eod = BYTE_EOD
        self.token_bytes = np.ones(self.vocab_size, np.int32)
        self.token_bytes[BYTE_EOD] = 0

    def encode_documents(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer.encode_documents`."""
        data = [text.encode("utf-8", "replace") for text in texts]
        # UTF-8 never holds the byte 0xFF, so it can mark ends until the ids are wide enough for 256.
        tokens_n = np.frombuffer(b"".join(part for item in data for part in (item, b"\xff")), np.uint8).astype(
            self.dtype
        )
        tokens_n[tokens_n == 0xFF] = BYTE_EOD
        return tokens_n, np.array([len(item) + 1 for item in data], np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        return bytes(i for i in ids if 0 <= i < BYTE_EOD).decode("utf-8", "replace")


class JsonTokenizer(Tokenizer):
    """A tokenizer.json. Special tokens that are spelt out in a text are encoded as plain text.

    Args:
        path: The file, or its folder. `eos_token` of a tokenizer_config.json beside it names the end-of-document
            token; without one, the well-known names are tried.

    Raises:
        UserError: The file is missing, is no tokenizer, or has no end-of-document token.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = str(path)
        file = Path(path).expanduser()
        self.file = file / "tokenizer.json" if file.is_dir() else file
        text = _read(self.file)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            spec = json.loads(text)
        except Exception as error:
            raise UserError(f"{self.file}: not a tokenizer.json of Hugging Face tokenizers ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.eod_name, self.eod = _find_eod(self.file, vocab)
        self.vocab_size = max(vocab.values()) + 1
        canonical = json.dumps({**spec, "truncation": None, "padding": None}, sort_keys=True)
        self.hash = hashlib.sha256(f"{canonical} eod {self.eod}".encode()).hexdigest()
        self.token_bytes = _token_bytes(spec, vocab, self._tokenizer, self.vocab_size)
        self.token_bytes[self.eod] = 0

    def encode_documents(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer.encode_documents`."""
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        tail = np.array([self.eod], self.dtype)
        parts = [part for item in ids for part in (np.array(item, self.dtype), tail)]
        tokens_n = np.concatenate(parts) if parts else np.zeros(0, self.dtype)
        return tokens_n, np.array([len(item) + 1 for item in ids], np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        return self._tokenizer.decode([int(i) for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=True)


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names: `byte`, or the path of a tokenizer.json or of its folder."""
    return ByteTokenizer() if name == "byte" else JsonTokenizer(name)


def train_bpe(texts: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Train a byte-level BPE tokenizer with one special token, `<|endoftext|>`.

    Args:
        texts: Documents.
        vocab_size: Largest vocabulary, special token included; at least `SMALLEST_BPE`.

    Raises:
        UserError: `vocab_size` is too small, or there is no text.
    """
    if vocab_size < SMALLEST_BPE:
        raise UserError(
            f"vocab_size={vocab_size}: must be at least {SMALLEST_BPE}: every byte, and the end of a document"
        )
    first = next(texts, None)
    if first is None:
        raise UserError("no text found to train a tokenizer on")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=vocab_size,
        special_tokens=[EOD_NAME],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def stream() -> Iterator[str]:
        yield first
        yield from texts

    tokenizer.train_from_iterator(stream(), trainer)
    return tokenizer


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except FileNotFoundError:
        raise UserError(f"data.tokenizer={file}: no such file; give 'byte' or the path of a tokenizer.json") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as a tokenizer.json ({error})") from error


def _find_eod(file: Path, vocab: dict[str, int]) -> tuple[str, int]:
    names: Sequence[str] = _EOD_NAMES
    beside = file.with_name("tokenizer_config.json")
    if beside.exists():
        try:
            eos = json.loads(beside.read_text("utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{beside}: cannot be read as JSON ({error})") from error
        eos = eos.get("content") if isinstance(eos, dict) else eos
        names = (eos, *names) if eos else names
    for name in names:
        if name in vocab:
            return name, vocab[name]
    raise UserError(f'{file}: no end-of-document token found; name it as "eos_token" in {beside}')


def _token_bytes(spec: dict[str, Any], vocab: dict[str, int], tokenizer: tokenizers.Tokenizer, size: int) -> np.ndarray:
    """Bytes of text per id, from how this kind of tokenizer spells its tokens."""
    kinds = {part.get("type") for key in ("pre_tokenizer", "decoder") for part in _parts(spec.get(key))}
    added = tokenizer.get_added_tokens_decoder()
    bytes_v = np.zeros(size, np.int32)
    for token, i in vocab.items():
        if i in added:
            bytes_v[i] = 0 if added[i].special else len(token.encode())
        elif "ByteLevel" in kinds:
            bytes_v[i] = len(token)  # one printable character stands for each byte
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            bytes_v[i] = 1
        else:
            bytes_v[i] = len(token.removeprefix("##").replace("\u2581", " ").encode())
    return bytes_v


def _parts(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a component of a tokenizer.json and what is nested in it."""
    if component:
        yield component
        for key in ("pretokenizers", "decoders"):
            for part in component.get(key, ()):
                yield from _parts(part)
