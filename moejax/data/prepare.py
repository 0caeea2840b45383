"""Text to a folder of tokens: in parallel, atomically, and so that a killed preparation goes on where it stopped.

Plan (files to pieces to shards), make the missing shards, join them, write the manifest. Shards wait in
FOLDER/.partial/PLAN until the manifest is there. The result does not depend on the number of workers.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import filelock
import numpy as np
from rich.console import Console

from moejax.data.corpora import PIECE, Piece, find_files, find_pieces
from moejax.data.shards import Shard, shard_files
from moejax.data.tokenfile import FORMAT, MANIFEST, Manifest, checksum, is_token_folder, read_manifest
from moejax.data.tokenizer import JsonTokenizer, Tokenizer
from moejax.data.workers import make_shards
from moejax.errors import UserError
from moejax.files import readable_errors, replacing

_OURS = frozenset({".partial", ".lock", "tokens.bin", "documents.bin", "tokenizer.json", "tokenizer_config.json"})


@dataclass(frozen=True)
class Plan:
    """What a preparation will do.

    Args:
        key: Hash of the files (path, size, time of change), the tokenizer and the format.
        shards: Pieces of each shard.
        files: Number of files.
        bytes: Their size.
    """

    key: str
    shards: list[list[Piece]]
    files: int
    bytes: int


def make_plan(sources: Sequence[str], tokenizer: Tokenizer) -> Plan:
    """Plan the preparation of `sources`: see `find_files` for what a source is and for errors."""
    files = [file.resolve() for file in find_files(sources)]
    stats = [file.stat() for file in files]
    listing = [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in zip(files, stats, strict=True)]
    key = hashlib.sha256(json.dumps([FORMAT, PIECE, tokenizer.hash, listing]).encode()).hexdigest()
    shards: list[list[Piece]] = []
    room = 0
    for piece in find_pieces(files):
        size = (piece.end or os.path.getsize(piece.path)) - piece.begin
        if room < size or not shards:
            shards.append([])
            room = PIECE
        shards[-1].append(piece)
        room -= size
    return Plan(key, shards, len(files), sum(stat.st_size for stat in stats))


def prepare(
    plan: Plan, folder: str | Path, tokenizer: Tokenizer, workers: int | None = None, quiet: bool = False
) -> Manifest:
    """Make `folder` a folder of tokens, or do nothing where it already is that of the same plan.

    Only one process at a time works on a folder; others wait, then find it done.

    Args:
        plan: From `make_plan`.
        folder: Where to write; missing parents are made. At the end of the work it needs room for the tokens twice.
        tokenizer: The tokenizer of the plan.
        workers: Processes; the number of cores if None. One works in this process.
        quiet: Show no progress.

    Raises:
        UserError: Text cannot be read, the folder cannot be written or holds something else, or there is no text.
    """
    folder = Path(folder).expanduser()
    console = Console(stderr=True, quiet=quiet)
    manifest = _existing(folder, plan)
    if manifest and not (folder / ".partial").exists():
        return manifest
    with readable_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, console):
            for left in folder.glob(".*.tmp"):  # of a process that was killed: nobody else works here
                left.unlink(missing_ok=True)
            manifest = _existing(folder, plan) or _prepare(plan, folder, tokenizer, workers or _num_cores(), console)
            shutil.rmtree(folder / ".partial", ignore_errors=True)
            return manifest


def _prepare(plan: Plan, folder: Path, tokenizer: Tokenizer, workers: int, console: Console) -> Manifest:
    partial = folder / ".partial" / plan.key[:16]
    partial.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, JsonTokenizer):
        with replacing(folder / "tokenizer.json") as out:
            out.write(tokenizer.file.read_bytes())
        with replacing(folder / "tokenizer_config.json") as out:
            out.write(json.dumps({"eos_token": tokenizer.eod_name}).encode())
    with replacing(partial / "plan.json") as out:
        spec = str(folder.resolve() / "tokenizer.json") if isinstance(tokenizer, JsonTokenizer) else tokenizer.name
        out.write(
            json.dumps({"tokenizer": spec, "shards": [[astuple(p) for p in shard] for shard in plan.shards]}).encode()
        )
    shards = make_shards(plan.shards, partial, tokenizer, workers, console)
    manifest = _join(plan, shards, folder, partial, tokenizer)
    with replacing(folder / MANIFEST) as out:
        out.write(manifest.to_json().encode())
    return manifest


def _join(plan: Plan, shards: Sequence[Shard], folder: Path, partial: Path, tokenizer: Tokenizer) -> Manifest:
    """Write tokens.bin and documents.bin from finished shards."""
    if not sum(shard.documents for shard in shards):
        undecodable = sum(shard.undecodable for shard in shards)
        raise UserError(f"{folder}: the sources hold no text (files read: {plan.files}, not UTF-8: {undecodable})")
    hashes = {"tokens": hashlib.sha256(), "documents": hashlib.sha256()}
    before = 0
    with replacing(folder / "tokens.bin") as tokens_out, replacing(folder / "documents.bin") as documents_out:
        for index, shard in enumerate(shards):
            tokens_file, documents_file, _ = shard_files(partial, index)
            with open(tokens_file, "rb") as stream:
                while block := stream.read(2**23):
                    hashes["tokens"].update(block)
                    tokens_out.write(block)
            ends = (np.fromfile(documents_file, "<i8") + before).tobytes()
            hashes["documents"].update(ends)
            documents_out.write(ends)
            before += shard.tokens
    counts = {name: sum(getattr(shard, name) for shard in shards) for name in asdict(shards[0])}
    return Manifest(
        format=FORMAT,
        plan=plan.key,
        tokenizer=tokenizer.name,
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        dtype=tokenizer.dtype.str,
        files=plan.files,
        content=hashlib.sha256(b"".join(part.digest() for part in hashes.values())).hexdigest(),
        checksums={name: checksum(folder / name) for name in ("tokens.bin", "documents.bin")},
        **counts,
    )


def _existing(folder: Path, plan: Plan) -> Manifest | None:
    """The manifest if the plan is done here; None if there is work to do; UserError if something else is here."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UserError(f"{folder}: is a file; give a folder to write tokens to")
    if is_token_folder(folder) and (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if manifest.plan != plan.key:
            raise UserError(
                f"{folder}: holds tokens of other text or of another tokenizer; delete it or give another folder"
            )
        return manifest
    strange = [item.name for item in folder.iterdir() if item.name not in _OURS and not item.name.endswith(".tmp")]
    if strange:
        raise UserError(f"{folder}: holds other files, such as '{min(strange)}'; give a new or empty folder")
    return None


@contextmanager
def _locked(folder: Path, console: Console) -> Iterator[None]:
    # The operating system frees the lock when its holder dies.
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        console.print(f"waiting for another process that prepares {folder}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
