"""Preparation: every kind of source, resuming after kills, errors."""

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import filelock
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from moejax import files
from moejax.data import corpora
from moejax.data.prepare import make_plan, prepare
from moejax.data.tokenfile import Manifest, TokenFile, checksum
from moejax.data.tokenizer import ByteTokenizer, JsonTokenizer, train_bpe
from moejax.errors import UserError

DOCS = ["first line\n", "second: naïve ☕", "a" * 300, "x"]
REPO = Path(__file__).parents[1]


def run(sources: list[Path | str], out: Path, tokenizer=None, workers: int = 1) -> Manifest:
    tokenizer = tokenizer or ByteTokenizer()
    return prepare(make_plan([str(source) for source in sources], tokenizer), out, tokenizer, workers, quiet=True)


def documents(out: Path) -> list[str]:
    """Text of every document of a folder of byte tokens."""
    file = TokenFile(out)
    parts = np.split(file.tokens, file.ends)[:-1]
    assert all(part[-1] == 256 for part in parts)
    return [ByteTokenizer().decode(part.tolist()) for part in parts]


def contents(out: Path) -> dict[str, bytes]:
    return {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}


def jsonl(docs: list[str]) -> bytes:
    return b"".join(json.dumps({"id": i, "text": text}).encode() + b"\n" for i, text in enumerate(docs))


def write_sources(folder: Path, kind: str) -> None:
    folder.mkdir()
    if kind == "txt":
        for i, text in enumerate(DOCS):
            (folder / f"{i}.txt").write_bytes(text.encode())
    elif kind == "txt.gz":
        for i, text in enumerate(DOCS):
            (folder / f"{i}.txt.gz").write_bytes(gzip.compress(text.encode()))
    elif kind == "parquet":
        table = pyarrow.table({"text": [*DOCS[:2], None, "", *DOCS[2:]], "n": range(6)})
        pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=2)
    else:
        pack = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}[kind]
        # Two members or frames in one file, as `cat a.gz b.gz` makes them.
        (folder / f"a.{kind}").write_bytes(pack(jsonl(DOCS[:1]) + b"\n") + pack(jsonl(DOCS[1:])))


@pytest.mark.parametrize("kind", ["txt", "txt.gz", "jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_every_kind_of_file_gives_the_same_tokens(kind: str, tmp_path: Path) -> None:
    write_sources(tmp_path / "in", kind)
    (tmp_path / "in" / "notes.md").write_text("not taken from a folder")
    manifest = run([tmp_path / "in"], tmp_path / "out")
    assert documents(tmp_path / "out") == DOCS
    size = sum(len(text.encode()) for text in DOCS)
    counts = (manifest.documents, manifest.text_bytes, manifest.tokens, manifest.undecodable)
    assert counts == (len(DOCS), size, size + len(DOCS), 0)
    assert not [
        name
        for name in contents(tmp_path / "out")
        if name not in ("tokens.bin", "documents.bin", "manifest.json", ".lock")
    ]


def test_stdlib_is_read_where_it_lies(tmp_path: Path) -> None:
    names = [file.as_posix() for file in corpora.find_files(["stdlib"])]
    assert names == sorted(names, key=Path)
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not [name for name in names if "site-packages" in name or "/test/" in name]
    started = time.monotonic()
    manifest = run(["stdlib"], tmp_path / "out")
    assert manifest.text_bytes > 5_000_000
    assert time.monotonic() - started < 20, "bulk work became per-byte work"
    assert Path(json.__file__).read_text() in documents(tmp_path / "out")


def test_files_globs_and_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/10.txt", "a/9.txt", "c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    run([tmp_path / "*.md", tmp_path / "b", tmp_path, tmp_path / "a" / "9.txt"], tmp_path / "out")
    assert documents(tmp_path / "out") == ["c.md", "b/2.txt", "a/10.txt", "a/9.txt"]


def test_text_that_is_not_utf8_is_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes(b"good")
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "half \\ud83d pair"}\n{"text": ""}\n')
    assert run([tmp_path / "*.*"], tmp_path / "out").undecodable == 1
    assert documents(tmp_path / "out") == ["good", "half ? pair"]


def test_long_text_is_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "BLOCK", 100)
    lines = [f"line {i} {'y' * (i % 37)}\n" for i in range(200)] + ["z" * 250 + "\n", "end"]
    (tmp_path / "a.txt").write_text("".join(lines))
    run([tmp_path / "a.txt"], tmp_path / "out")
    docs = documents(tmp_path / "out")
    assert "".join(docs) == "".join(lines)
    assert all(doc.endswith("\n") for doc in docs[:-1])
    assert max(map(len, docs)) < 100 + 251


@pytest.mark.parametrize("piece", [1, 7, 50, 51, 52, 1000, 10**6])
def test_ranges_of_a_file_cover_every_line_once(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of 51 bytes, so that ranges end before, at and after line ends, and some hold no line's start."""
    monkeypatch.setattr(corpora, "PIECE", piece)
    docs = [f"{i:03}" + "t" * 35 for i in range(20)]
    (tmp_path / "a.jsonl").write_bytes(b"".join(json.dumps({"text": doc}).encode() + b"\n" for doc in docs))
    (tmp_path / "a.txt").write_text("".join(f"{doc:>50}\n" for doc in docs))
    pieces = corpora.find_pieces([tmp_path / "a.jsonl", tmp_path / "a.txt"])
    assert len(pieces) == 2 * -(-1020 // piece)
    text = [list(corpora.read_documents(item, corpora.Counter())) for item in pieces]
    half = len(pieces) // 2
    assert [doc for part in text[:half] for doc in part] == docs
    assert "".join(doc for part in text[half:] for doc in part) == (tmp_path / "a.txt").read_text()


def make_corpus(folder: Path) -> None:
    """Several shards of about 5,000 bytes: small files together, a cut one, a packed one."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    texts = ["".join(chr(c) for c in rng.integers(32, 382, n)) + "\n" for n in rng.integers(1, 900, 20)]
    for i, text in enumerate(texts[:6]):
        (folder / f"{i}.txt").write_text(text)
    (folder / "big.jsonl").write_bytes(jsonl(texts[6:16]))
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(jsonl(texts[16:]), mtime=0))


# Shards of a few kilobytes; nothing here needs to outlive a power cut, and fsync is slow.
SMALL_PIECES = "import os; os.fsync = lambda _: None; import moejax.data.corpora as c; c.PIECE = 5000\n"
# Forks a child that kills itself before or after its k-th rename, then one that finishes, for every k.
KILLED_AT_EVERY_RENAME = (
    SMALL_PIECES
    + """
import os, signal, sys
from moejax.data.prepare import make_plan, prepare
from moejax.data.tokenizer import ByteTokenizer
source, out = sys.argv[1:]
replace = os.replace

def child(folder, at=None, late=False):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    count = 0
    def rename(a, b):
        nonlocal count
        count += 1
        if count == at and not late:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(a, b)
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
    os.replace = rename
    prepare(make_plan([source], ByteTokenizer()), folder, ByteTokenizer(), 1, quiet=True)
    os._exit(0)

at = 1
while True:
    for late in (False, True):
        folder = f"{out}/{at}{'late' if late else ''}"
        status = child(folder, at, late)
        if status == 0:
            print(at - 1)
            sys.exit()
        assert status == signal.SIGKILL, status
        status = child(folder, at=None)
        assert status == 0, status
    at += 1
"""
)


def test_killed_at_every_rename_then_run_again_gives_the_same_bytes(tmp_path: Path) -> None:
    make_corpus(tmp_path / "in")
    code = [sys.executable, "-c", KILLED_AT_EVERY_RENAME, tmp_path / "in", tmp_path / "out"]
    done = subprocess.run(code, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    renames = int(done.stdout)
    shards = (renames - 4) // 3  # plan.json, tokens.bin, documents.bin and manifest.json besides three for each shard
    assert shards >= 4
    assert renames == 4 + 3 * shards
    folders = sorted((tmp_path / "out").iterdir())
    assert len(folders) == 2 * renames + 1
    want = contents(folders[-1])
    assert set(want) == {"tokens.bin", "documents.bin", "manifest.json", ".lock"}
    assert all(contents(folder) == want for folder in folders)


def test_killed_at_any_moment_with_workers(tmp_path: Path) -> None:
    make_corpus(tmp_path / "in")
    program = (
        SMALL_PIECES
        + "import sys; from moejax.cli.data import run_prepare; run_prepare([sys.argv[1]], sys.argv[2], workers=2)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "in")]
    for delay in (0.3, 0.6, 0.9, 1.2):
        process = subprocess.Popen(
            [*command, str(tmp_path / "a")], cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with_manifest = (tmp_path / "a" / "manifest.json").exists()
        if with_manifest:
            TokenFile(tmp_path / "a")  # complete, or this raises
    for name in ("a", "b"):
        subprocess.run([*command, str(tmp_path / name)], cwd=REPO, check=True, stdout=subprocess.DEVNULL, timeout=60)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_finished_shards_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_corpus(tmp_path / "in")
    monkeypatch.setattr(corpora, "PIECE", 5000)
    monkeypatch.setattr("moejax.data.prepare.PIECE", 5000)
    run([tmp_path / "in"], tmp_path / "want")
    made: list[int] = []

    def write(folder: Path, index: int, *rest) -> None:
        made.append(index)
        if len(made) == 4:
            raise KeyboardInterrupt
        original(folder, index, *rest)

    from moejax.data import workers

    original = workers.write_shard
    monkeypatch.setattr(workers, "write_shard", write)
    with pytest.raises(KeyboardInterrupt):
        run([tmp_path / "in"], tmp_path / "out")
    damaged = next((tmp_path / "out").rglob("000001.tokens"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    run([tmp_path / "in"], tmp_path / "out")
    assert made[:6] == [0, 1, 2, 3, 1, 3], "shards 0 and 2 were whole, 1 was damaged, 3 never made"
    assert contents(tmp_path / "out") == contents(tmp_path / "want")
    run([tmp_path / "in"], tmp_path / "out")
    assert len(set(made)) == len(made) - 2, "a finished folder was made again"


def test_tokenizer_file_in_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_corpus(tmp_path / "in")
    monkeypatch.setattr(corpora, "PIECE", 8000)
    monkeypatch.setattr("moejax.data.prepare.PIECE", 8000)
    file = tmp_path / "t.json"
    file.write_text(train_bpe(iter(["ab ab ab naïve"] * 9), 270).to_str())
    run([tmp_path / "in"], tmp_path / "one", JsonTokenizer(file), workers=1)
    run([tmp_path / "in"], tmp_path / "two", JsonTokenizer(file), workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    TokenFile(tmp_path / "one").require(JsonTokenizer(tmp_path / "two"))


def test_others_wait_for_the_lock(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    out = tmp_path / "out"
    out.mkdir()
    thread = threading.Thread(target=run, args=([tmp_path / "a.txt"], out))
    with filelock.FileLock(out / ".lock"):
        thread.start()
        time.sleep(0.3)
        assert not (out / "manifest.json").exists()
    thread.join(timeout=20)
    assert documents(out) == ["text"]


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").mkdir()
    hold = "filelock.FileLock(sys.argv[1]).acquire(); print('held', flush=True)"
    program = f"import filelock, sys, time; {hold}; time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "out" / ".lock"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    run([tmp_path / "a.txt"], tmp_path / "out")


BAD_TEXT = {
    "a.jsonl": (b'{"text": "x"}\n{"text": \n', r"a.jsonl:2: not a line of JSON"),
    "b.jsonl": (b'{"body": "x"}\n', r"b.jsonl:1: no string field 'text'"),
    "c.jsonl": (b'{"text": 3}\n', r"c.jsonl:1: no string field 'text'"),
    "d.jsonl.gz": (gzip.compress(jsonl(DOCS))[:-9], r"d.jsonl.gz: damaged or cut off"),
    "e.jsonl.gz": (b"not gzip", r"e.jsonl.gz: damaged or cut off"),
    "f.jsonl.zst": (zstandard.compress(jsonl(DOCS * 99))[:-9], r"f.jsonl.zst: damaged or cut off"),
    "g.jsonl.zst": (b"not zstandard", r"g.jsonl.zst: damaged or cut off"),
    "h.parquet": (b"not parquet", r"h.parquet: cannot be read as .parquet"),
    "i.txt": (b"", r"the sources hold no text \(files read: 1, not UTF-8: 0\)"),
    "j.txt": (b"\xff", r"the sources hold no text \(files read: 1, not UTF-8: 1\)"),
}


@pytest.mark.parametrize("name", BAD_TEXT)
def test_bad_text(name: str, tmp_path: Path) -> None:
    data, message = BAD_TEXT[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        run([tmp_path / name], tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_bad_text_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moejax.data.prepare.PIECE", 10)
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "good"}\n' if name != "b" else "bad\n")
    with pytest.raises(UserError, match=r"b.jsonl:1: not a line of JSON"):
        run([tmp_path / "*.jsonl"], tmp_path / "out", workers=2)


def test_parquet_without_text(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="no string column 'text'; columns are body, n"):
        run([tmp_path / "a.parquet"], tmp_path / "out")


@pytest.mark.parametrize(("ending", "package"), [("zst", "zstandard"), ("parquet", "pyarrow")])
def test_missing_packages_are_named(ending: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"a.{ending}").write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "moejax.data.zst", raising=False)
    with pytest.raises(UserError, match=rf"reading .{ending} needs {package}; pip install 'moejax\[data\]'"):
        run([tmp_path / f"a.{ending}"], tmp_path / "out")


def test_sources_that_match_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone: no such file or folder; give a file, a folder, a glob, or 'stdlib'"):
        run([tmp_path / "gone"], tmp_path / "out")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.md").write_text("x")
    with pytest.raises(
        UserError, match=r"no file that ends in .txt, .*; for other text files give a glob, such as '.*/in/\*\*/\*.md'"
    ):
        run([tmp_path / "in"], tmp_path / "out")
    run([tmp_path / "in" / "a.md"], tmp_path / "out")
    with pytest.raises(UserError, match=r"already holds tokens; give the text"):
        run([tmp_path / "out"], tmp_path / "again")


def test_folders_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").write_text("y")
    with pytest.raises(UserError, match=r"a.txt: is a file; give a folder"):
        run([tmp_path / "a.txt"], tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"a.txt/out: Not a directory; give a folder that can be written"):
        run([tmp_path / "a.txt"], tmp_path / "a.txt" / "out")
    with pytest.raises(UserError, match=r"holds other files, such as 'a.txt'; give a new or empty folder"):
        run([tmp_path / "a.txt"], tmp_path)
    run([tmp_path / "a.txt"], tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match=r"holds tokens of other text or of another tokenizer"):
        run([tmp_path / "b.txt"], tmp_path / "out")
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("workers", [1, 2])
def test_full_disk(workers: int, tmp_path: Path) -> None:
    """A limit on file sizes stands in for a full disk: writes fail half-way in the same manner."""
    make_corpus(tmp_path / "in")
    program = SMALL_PIECES + (
        "import resource, sys\n"
        "from moejax.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))\n"
        "sys.exit(main(sys.argv[2:]))"
    )
    verb = ["data", "prepare", tmp_path / "in", "--out", tmp_path / "out", f"--workers={workers}"]

    def prepare_below(limit: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, str(limit), *verb]
        return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, timeout=60)

    done = prepare_below(1500)
    assert done.returncode == 2, done.stderr
    assert "the disk is full" in done.stderr
    assert "then run the same again" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list((tmp_path / "out").rglob("*.tmp"))
    assert prepare_below(2**30).returncode == 0
    TokenFile(tmp_path / "out")


def test_no_space_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(UserError, match=r"out: the disk is full \(\d+ MiB free\); free some space"):
        run([tmp_path / "a.txt"], tmp_path / "out")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    run([tmp_path / "a.txt"], tmp_path / "out")
    return tmp_path / "out"


def test_damaged_tokens(tokens: Path) -> None:
    for name in ("tokens.bin", "documents.bin"):
        file = tokens / name
        good = file.read_bytes()
        file.write_bytes(good[:-2])
        with pytest.raises(UserError, match=rf"{name}: has \d+ bytes where the manifest says \d+, so it was cut off"):
            TokenFile(tokens)
        file.write_bytes(good[:5] + bytes([good[5] ^ 1]) + good[6:])
        with pytest.raises(UserError, match=rf"{name}: is damaged, its checksum differs"):
            TokenFile(tokens)
        file.unlink()
        with pytest.raises(UserError, match=rf"{name}: is missing; delete"):
            TokenFile(tokens)
        file.write_bytes(good)
    TokenFile(tokens)


def test_damaged_manifest(tokens: Path) -> None:
    file = tokens / "manifest.json"
    good = json.loads(file.read_text())
    for bad, message in [
        (file.read_text()[:-20], "manifest.json: damaged"),
        ("[]", "manifest.json: damaged"),
        (json.dumps({**good, "tokens": "many"}), r"damaged \(a value of the wrong type\)"),
        (json.dumps({**good, "dtype": "float99"}), "manifest.json: damaged"),
        (json.dumps({**good, "format": 99}), "tokens of format 99, but this version reads 1; prepare them again"),
    ]:
        file.write_text(bad)
        with pytest.raises(UserError, match=message):
            TokenFile(tokens)
    file.unlink()
    with pytest.raises(UserError, match=r"has no manifest\.json, so its preparation did not finish"):
        TokenFile(tokens)


def test_checksum_of_a_long_file_sees_both_ends(tmp_path: Path) -> None:
    file = tmp_path / "long"
    size = 65 * 2**20 + 1
    with open(file, "wb") as stream:
        stream.truncate(size)
    before = checksum(file)
    for at in (0, size - 1):
        with open(file, "r+b") as stream:
            stream.seek(at)
            stream.write(b"x")
        after = checksum(file)
        assert after != before
        before = after
