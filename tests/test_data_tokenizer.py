"""Tokenizers: bytes, and tokenizer.json files of several kinds."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from moejax.data.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer, train_bpe
from moejax.errors import UserError

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "naïve – déjà vu ☕\t",
    "a",
    "x <|endoftext|> y </s>",
    "\x00\x7f",
    "  two  spaces ",
]


@pytest.fixture
def bpe(tmp_path: Path) -> Path:
    file = tmp_path / "bpe.json"
    file.write_text(train_bpe(iter(TEXTS * 20), 300).to_str())
    return file


@pytest.fixture
def metaspace(tmp_path: Path) -> Path:
    """A tokenizer of the SentencePiece kind: words begin with U+2581, unknown characters become byte tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])  # pyright: ignore[reportAttributeAccessIssue]
    special = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, show_progress=False)  # pyright: ignore[reportCallIssue]
    tokenizer.train_from_iterator(TEXTS[:1] * 5, trainer)
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["content"] in ("<unk>", "</s>")
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["special"]]
    file = tmp_path / "metaspace.json"
    file.write_text(json.dumps(spec))
    return file


def test_byte_tokenizer_is_utf8() -> None:
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.dtype) == (257, 256, np.dtype("<u2"))
    tokens, lengths = tokenizer.encode_documents(TEXTS)
    want = [token for text in TEXTS for token in [*text.encode(), 256]]
    assert tokens.tolist() == want
    assert lengths.tolist() == [len(text.encode()) + 1 for text in TEXTS]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
    assert tokenizer.token_bytes.tolist() == [1] * 256 + [0]
    assert tokenizer.decode([0xE2, 256, 65]) == "�A"


def test_trained_bpe_round_trip(bpe: Path) -> None:
    tokenizer = JsonTokenizer(bpe)
    tokens, lengths = tokenizer.encode_documents(TEXTS)
    parts = np.split(tokens, np.cumsum(lengths)[:-1])
    assert all(part[-1] == tokenizer.eod and (part[:-1] != tokenizer.eod).all() for part in parts)
    assert [tokenizer.decode(part.tolist()) for part in parts] == TEXTS
    assert tokenizer.vocab_size <= 300
    assert len(tokens) < sum(len(text.encode()) + 1 for text in TEXTS), "nothing was merged"


@pytest.mark.parametrize("kind", ["byte", "bpe", "metaspace"])
def test_token_bytes_add_up_to_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = load_tokenizer("byte" if kind == "byte" else str(request.getfixturevalue(kind)))
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    for text in TEXTS:
        given = " " + text if kind == "metaspace" and not text.startswith(" ") else text  # Metaspace puts a space first
        assert tokenizer.token_bytes[tokenizer.encode(text)].sum() == len(given.encode()), text


def test_training_is_deterministic_and_bounded() -> None:
    first, second = (train_bpe(iter(TEXTS * 20), 280).to_str() for _ in range(2))
    assert first == second
    with pytest.raises(UserError, match="vocab_size=256: must be at least 257"):
        train_bpe(iter(TEXTS), 256)
    with pytest.raises(UserError, match="no text found"):
        train_bpe(iter([]), 300)


def test_hash_follows_the_content_alone(bpe: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "tokenizer.json"
    copy.parent.mkdir()
    copy.write_text(json.dumps(json.loads(bpe.read_text()), indent=7))
    assert JsonTokenizer(copy).hash == JsonTokenizer(copy.parent).hash == JsonTokenizer(bpe).hash
    other = tmp_path / "other.json"
    other.write_text(train_bpe(iter(TEXTS * 20), 299).to_str())
    assert len({JsonTokenizer(other).hash, JsonTokenizer(bpe).hash, ByteTokenizer().hash}) == 3


def test_truncation_and_padding_of_the_file_are_ignored(bpe: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(bpe))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    short = tmp_path / "short.json"
    short.write_text(tokenizer.to_str())
    assert JsonTokenizer(short).encode(TEXTS[0]) == JsonTokenizer(bpe).encode(TEXTS[0])
    assert JsonTokenizer(short).hash == JsonTokenizer(bpe).hash


def test_eos_of_tokenizer_config_wins(bpe: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(bpe))
    tokenizer.add_special_tokens([AddedToken("<|stop|>", special=True)])
    file = tmp_path / "t" / "tokenizer.json"
    file.parent.mkdir()
    file.write_text(tokenizer.to_str())
    before = JsonTokenizer(file)
    file.with_name("tokenizer_config.json").write_text('{"eos_token": {"content": "<|stop|>"}}')
    after = JsonTokenizer(file)
    assert (before.eod_name, after.eod_name) == ("<|endoftext|>", "<|stop|>")
    assert before.hash != after.hash


def test_bad_tokenizer_files(bpe: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.tokenizer=.*gone.json: no such file; give 'byte' or the path"):
        load_tokenizer(str(tmp_path / "gone.json"))
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(UserError, match=r"bad.json: not a tokenizer.json"):
        load_tokenizer(str(bad))
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"bad.json: cannot be read"):
        load_tokenizer(str(bad))
    bad.write_text(bpe.read_text().replace("<|endoftext|>", "<|nothing|>"))
    with pytest.raises(UserError, match=r"no end-of-document token found; name it as \"eos_token\""):
        load_tokenizer(str(bad))
    bad.with_name("tokenizer_config.json").write_text("[")
    with pytest.raises(UserError, match=r"tokenizer_config.json: cannot be read as JSON"):
        load_tokenizer(str(bad))
