"""`moejax data prepare` and `moejax data train-tokenizer` as a shell sees them."""

import subprocess
import sys
from pathlib import Path

import pytest

from moejax.cli.main import main
from moejax.data.tokenfile import TokenFile
from moejax.data.tokenizer import JsonTokenizer

REPO = Path(__file__).parents[1]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some words, some words\n" * 50)
    (tmp_path / "text" / "b.txt").write_bytes(b"\xff")
    return tmp_path / "text"


def test_prepare_twice(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        assert main(["data", "prepare", str(text), "--out", str(out)]) == 0
        printed = capsys.readouterr().out
        assert "1 documents, 1,151 tokens, 1,150 bytes of text, 1.00 bytes per token" in printed
        assert "left out, because not UTF-8: 1 documents" in printed
        assert f"moejax train CONFIG --data.corpus={out}\n" in printed
    assert TokenFile(out).manifest.documents == 1


def test_tokenizer_from_training_to_tokens(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "new" / "tokenizer.json", tmp_path / "out"
    assert main(["data", "train-tokenizer", str(text), "--out", str(file), "--vocab-size", "262"]) == 0
    assert f"{file}: 262 tokens" in capsys.readouterr().out
    assert main(["data", "prepare", str(text), "--out", str(out), "--tokenizer", str(file)]) == 0
    options = f"--data.corpus={out} --data.tokenizer={out}/tokenizer.json --model.vocab_size=262"
    assert options in capsys.readouterr().out
    tokens = TokenFile(out)
    assert JsonTokenizer(out).decode(tokens.tokens.tolist()) == (text / "a.txt").read_text()
    before = file.read_bytes()
    assert main(["data", "train-tokenizer", str(text), "--out", str(file), "--vocab-size", "262"]) == 2
    assert "exists; token files may depend on it" in capsys.readouterr().err
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "TEXT/gone", "--out", "OUT"], "gone: no such file or folder"),
        (["prepare", "TEXT", "--out", "OUT", "--tokenizer", "TEXT/gone.json"], "gone.json: no such file; give 'byte'"),
        (["prepare", "TEXT", "--out", "OUT", "--workers", "0"], "--workers=0: must be at least 1"),
        (["prepare", "TEXT", "--out", "TEXT"], "holds other files, such as 'a.txt'"),
        (["prepare", "TEXT"], "--out"),
        (["prepare", "TEXT", "--out", "OUT", "--worker-count=3"], "--worker-count=3"),
        (["prepaer", "TEXT", "--out", "OUT"], "prepaer"),
        (["train-tokenizer", "TEXT/b.txt", "--out", "OUT", "--vocab-size=300"], "no text found"),
        (["train-tokenizer", "TEXT", "--out", "OUT", "--vocab-size=3"], "--vocab-size=3: must be at least 257"),
        (["train-tokenizer", "TEXT/c.jsonl", "--out", "OUT", "--vocab-size=300"], "c.jsonl:2: not a line of JSON"),
        (
            ["train-tokenizer", "TEXT", "--out", "TEXT/a.txt/t.json", "--vocab-size=300"],
            "give a folder that can be written",
        ),
    ],
)
def test_bad_input(
    arguments: list[str], message: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "TEXT/c.jsonl" in arguments:
        (text / "c.jsonl").write_text('{"text": "x"}\nnonsense\n')
    filled = [item.replace("TEXT", str(text)).replace("OUT", str(tmp_path / "out")) for item in arguments]
    assert main(["data", *filled]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_data_verbs_do_not_need_jax(text: Path, tmp_path: Path) -> None:
    """Preparing text takes a fraction of a second: no JAX is imported for it."""
    program = (
        "import sys; from moejax.cli.main import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'jax', 'grain', 'flax'}))"
    )
    command = [sys.executable, "-c", program, "data", "prepare", str(text), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
