"""`moejax data`: text to token files, and tokenizers from text."""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from moejax.errors import UserError


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `data` with its verbs `prepare` and `train-tokenizer`."""
    parser = subparsers.add_parser("data", help="prepare text for training", description="Prepare text for training.")
    verbs = parser.add_subparsers(dest="data_verb", metavar="COMMAND", required=True)
    sources = (
        "'stdlib', a file, a quoted glob, or a folder; .txt, .jsonl (field 'text'), both also .gz or .zst, .parquet"
    )

    text = "Tokenize text into a folder that data.corpus can name. Stopped half-way, the same command goes on."
    prepare = verbs.add_parser("prepare", help="tokenize text into a folder", description=text)
    prepare.add_argument("sources", nargs="+", metavar="SOURCE", help=sources)
    prepare.add_argument("--out", required=True, metavar="DIR", help="folder to write, new or empty")
    prepare.add_argument("--tokenizer", default="byte", metavar="FILE", help="a tokenizer.json; default: bytes")
    prepare.add_argument("--workers", type=int, metavar="N", help="processes; default: one per core")
    prepare.set_defaults(run=lambda args: run_prepare(args.sources, args.out, args.tokenizer, args.workers))

    text = "Train a byte-level BPE tokenizer."
    train = verbs.add_parser("train-tokenizer", help="train a BPE tokenizer on text", description=text)
    train.add_argument("sources", nargs="+", metavar="SOURCE", help=sources)
    train.add_argument("--out", required=True, metavar="FILE", help="tokenizer.json to write; must not exist")
    train.add_argument("--vocab-size", required=True, type=int, metavar="N", help="tokens, at least 257")
    train.set_defaults(run=lambda args: run_train_tokenizer(args.sources, args.out, args.vocab_size))


def run_prepare(sources: Sequence[str], out: str, tokenizer: str = "byte", workers: int | None = None) -> int:
    """Tokenize `sources` into folder `out`; return exit code 0. Raises `UserError`."""
    from moejax.data.prepare import make_plan, prepare
    from moejax.data.tokenizer import load_tokenizer

    if workers is not None and workers < 1:
        raise UserError(f"--workers={workers}: must be at least 1")
    encoder = load_tokenizer(tokenizer)
    manifest = prepare(make_plan(sources, encoder), out, encoder, workers)
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{out}: {manifest.documents:,} documents, {manifest.tokens:,} tokens, {manifest.text_bytes:,} bytes of text,"
        f" {manifest.text_bytes / (manifest.tokens - manifest.documents):.2f} bytes per token",
        markup=False,
    )
    if manifest.undecodable:
        console.print(f"left out, because not UTF-8: {manifest.undecodable:,} documents")
    options = f"--data.corpus={out}"
    if tokenizer != "byte":
        options += f" --data.tokenizer={Path(out, 'tokenizer.json')} --model.vocab_size={manifest.vocab_size}"
    console.print(f"train on it: moejax train CONFIG {options}", markup=False)
    return 0


def run_train_tokenizer(sources: Sequence[str], out: str, vocab_size: int) -> int:
    """Train a BPE tokenizer of at most `vocab_size` tokens into file `out`; return exit code 0. Raises `UserError`."""
    from moejax.data.corpora import find_files, find_pieces, read_documents
    from moejax.data.progress import progress_bar
    from moejax.data.tokenizer import SMALLEST_BPE, train_bpe
    from moejax.files import write_result

    file = Path(out).expanduser()
    if file.exists():
        raise UserError(f"{out}: exists; token files may depend on it, so remove it yourself or give another name")
    if vocab_size < SMALLEST_BPE:
        raise UserError(
            f"--vocab-size={vocab_size}: must be at least {SMALLEST_BPE}: every byte, and the end of a document"
        )
    files = find_files(sources)
    with progress_bar(Console(stderr=True), "reading", sum(item.stat().st_size for item in files)) as show:

        def texts() -> Iterator[str]:
            done = 0
            for piece in find_pieces(files):
                for text in read_documents(piece, Counter()):
                    yield text
                    done += len(text)
                    show(done)

        tokenizer = train_bpe(texts(), vocab_size)
    write_result(file, tokenizer.to_str(pretty=True))
    size = tokenizer.get_vocab_size()
    print(f"{out}: {size:,} tokens\nuse it: moejax data prepare SOURCE... --out DIR --tokenizer {out}")
    return 0
