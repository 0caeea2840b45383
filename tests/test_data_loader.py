"""Batches: their order, resuming, mixtures, splits, and errors of configuration."""

import itertools
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moejax.config import Config, DataConfig, MixtureSource, ModelConfig, RunConfig
from moejax.data.loader import Loader
from moejax.data.packing import KEYS, Batch, Split
from moejax.data.prepare import make_plan, prepare
from moejax.data.tokenfile import TokenFile
from moejax.data.tokenizer import ByteTokenizer, JsonTokenizer, train_bpe
from moejax.errors import UserError

REPO = Path(__file__).parents[1]
LENGTH, BATCH = 16, 5


def write_corpus(folder: Path, count: int = 40, letters: str = "abcdefgh") -> Path:
    folder.mkdir()
    rng = np.random.default_rng(count)
    for i in range(count):
        (folder / f"{i}.txt").write_text("".join(rng.choice(list(letters), rng.integers(1, 60))))
    return folder


def config_of(tmp_path: Path, corpus: Path | str, seed: int = 0, **data) -> Config:
    fields = {"corpus": str(corpus), "sequence_length": LENGTH, "batch_size": BATCH, "heldout_fraction": 0.1, **data}
    return Config(run=RunConfig(root=str(tmp_path / "runs"), seed=seed), data=DataConfig(**fields))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path, write_corpus(tmp_path / "text"))


def load(config: Config, split: Split = "train") -> Loader:
    return Loader(config, split, quiet=True)


def same(a: Batch, b: Batch) -> bool:
    return all(np.array_equal(a[key], b[key]) for key in KEYS)


def stream(loader: Loader, first: int, count: int) -> list[tuple[bytes, ...]]:
    """Rows of the endless stream, `count` from row `first` on, in a form that can be sorted."""
    rows = []
    for index in range(first, first + count):
        batch = loader.batch(index // loader.batch_size, [index % loader.batch_size])
        rows.append(tuple(batch[key][0].tobytes() for key in KEYS))
    return rows


def test_batches_are_int32_and_well_formed(config: Config) -> None:
    loader = load(config)
    assert loader.num_rows % BATCH, "an epoch shall not end with a batch here"
    batch = loader.batch(3)
    assert tuple(batch) == KEYS
    assert all(value.shape == (BATCH, LENGTH) and value.dtype == np.int32 for value in batch.values())
    assert batch["tokens"].max() < loader.vocab_size == 257
    assert loader.token_bytes.dtype == np.int32


def test_every_token_is_a_target_once_per_epoch(config: Config) -> None:
    targets = []
    for split in ("train", "heldout"):
        loader = load(config, split)
        for index in range(loader.num_rows):
            batch = loader.batch(index // BATCH, [index % BATCH])
            valid = batch["segments"] != 0
            assert not batch["targets"][~valid].any()
            assert not batch["tokens"][~valid].any()
            targets += batch["targets"][valid].tolist()
    (folder,) = (Path(config.run.root) / ".tokens").iterdir()
    assert sorted(targets) == sorted(TokenFile(folder).tokens.tolist())


def test_epochs_hold_the_same_rows_in_another_order(config: Config) -> None:
    loader = load(config)
    n = loader.num_rows
    epochs = [stream(loader, n * i, n) for i in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != sorted(epochs[0])


def test_order_does_not_depend_on_how_rows_are_divided(config: Config) -> None:
    loader = load(config)
    for step in (0, 7, 10**6):
        whole = loader.batch(step)
        for parts in ([[0, 1, 2, 3, 4]], [[0, 1], [2, 3, 4]], [[4], [0, 2], [3, 1]], [[i] for i in range(BATCH)]):
            for rows in parts:
                assert same(loader.batch(step, rows), {key: whole[key][rows] for key in KEYS})
    assert loader.batch(0, [])["tokens"].shape == (0, LENGTH)
    with pytest.raises(IndexError, match="row 5 of a batch of 5"):
        loader.batch(0, [5])


def test_resume_at_any_step_in_a_new_loader(config: Config) -> None:
    want = list(itertools.islice(load(config).batches(0), 40))
    for start in (0, 1, 13, 39):
        again = load(config)
        assert same(again.batch(start), want[start])
        got = itertools.islice(again.batches(start, rows=[3, 0]), 40 - start)
        assert all(same(a, {key: b[key][[3, 0]] for key in KEYS}) for a, b in zip(got, want[start:], strict=True))


def test_order_of_another_process_is_the_same(config: Config) -> None:
    program = (
        "import sys; from moejax.config import *; from moejax.data.loader import Loader\n"
        f"c = Config(run=RunConfig(root={config.run.root!r}), data=DataConfig(corpus={config.data.corpus!r},"
        f" sequence_length={LENGTH}, batch_size={BATCH}, heldout_fraction=0.1))\n"
        "sys.stdout.buffer.write(Loader(c, 'train').batch(11)['tokens'].tobytes())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, env=environment, capture_output=True, check=True)
    assert done.stdout == load(config).batch(11)["tokens"].tobytes()


def test_seed_decides_the_order_of_training_alone(config: Config) -> None:
    other = replace(config, run=replace(config.run, seed=1))
    assert not same(load(config).batch(0), load(other).batch(0))
    assert same(load(config, "heldout").batch(0), load(other, "heldout").batch(0))
    assert load(config).fingerprint == load(other).fingerprint


def test_held_out_is_in_order_and_wraps_around(config: Config) -> None:
    loader = load(config, "heldout")
    n = loader.num_rows
    assert 1 < n < 3 * BATCH
    assert stream(loader, n, n) == stream(loader, 0, n)
    assert same(loader.batch(n), loader.batch(0)), "n batches are B passes"
    assert len(set(stream(loader, 0, n))) == n


def test_fewer_rows_than_a_batch(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789" * 2)
    loader = load(config_of(tmp_path, tmp_path / "a.txt"))
    assert loader.num_rows == 2
    batch = loader.batch(0)
    firsts = sorted(batch["tokens"][:, 0].tolist())
    assert firsts in ([ord("5")] * 2 + [256] * 3, [ord("5")] * 3 + [256] * 2)


def test_positions_start_again_in_every_row(config: Config) -> None:
    batch = load(config).batch(0)
    assert (batch["positions"][:, 0] == 0).all()
    assert (batch["tokens"][:, 0] != 256).any(), "some rows shall go on with a document"
    step = np.diff(batch["positions"], axis=1)
    inside = (np.diff(batch["segments"], axis=1) == 0) & (batch["segments"][:, 1:] != 0)
    assert (step[inside] == 1).all()


@pytest.mark.parametrize(
    ("weights", "shares"), [((3.0, 1.0), (0.75, 0.25)), ((0.2, 0.2), (0.5, 0.5)), ((1, 9), (0.1, 0.9))]
)
def test_mixture_shares(weights: tuple[float, float], shares: tuple[float, float], tmp_path: Path) -> None:
    small = write_corpus(tmp_path / "small", 9, "ab")
    large = write_corpus(tmp_path / "large", 60, "yz")
    mixture = (MixtureSource(str(small), weights[0]), MixtureSource(str(large), weights[1]))
    for split in ("train", "heldout"):
        loader = load(config_of(tmp_path, "stdlib", mixture=mixture), split)
        rows = np.concatenate([loader.batch(i)["targets"] for i in range(120)])
        from_small = ((rows == ord("a")) | (rows == ord("b"))).any(axis=1)
        from_large = ((rows == ord("y")) | (rows == ord("z"))).any(axis=1)
        known = from_small.sum() + from_large.sum()  # a row of one end-of-document token tells nothing
        assert not (from_small & from_large).any()
        assert known > 0.9 * len(rows)
        assert from_small.sum() / known == pytest.approx(shares[0], abs=0.02)
        # Interleaved evenly: every stretch of the stream has the shares.
        tenths = from_large.reshape(10, -1).mean(axis=1)
        assert tenths == pytest.approx(np.full(10, shares[1]), abs=0.1)


def test_sources_of_equal_length_are_shuffled_differently(tmp_path: Path) -> None:
    a, b = (write_corpus(tmp_path / name, 40, letters) for name, letters in (("a", "abcd"), ("b", "ABCD")))
    loader = load(config_of(tmp_path, "stdlib", mixture=(MixtureSource(str(a)), MixtureSource(str(b)))))
    rows = [loader.batch(0, [i])["targets"][0] for i in range(4)]
    lowered = [bytes(row[row < 256].astype(np.uint8)).lower() for row in rows]
    assert len(set(lowered)) == 4


def test_fingerprint_follows_what_decides_the_text(config: Config, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other", 41)
    data = config.data
    variants = [
        replace(config, data=replace(data, corpus=str(other))),
        replace(config, data=replace(data, heldout_fraction=0.2)),
        replace(
            config, data=replace(data, corpus="stdlib", mixture=(MixtureSource(data.corpus), MixtureSource(str(other))))
        ),
    ]
    prints = [load(variant).fingerprint for variant in (config, *variants)] + [load(config, "heldout").fingerprint]
    assert len(set(prints)) == len(prints)
    moved = Path(data.corpus).rename(tmp_path / "moved")
    assert load(replace(config, data=replace(data, corpus=str(moved)))).fingerprint == prints[0]


def test_raw_text_is_tokenized_once_and_again_when_it_changes(config: Config, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    config = replace(config, data=replace(config.data, cache=str(cache)))
    first = load(config)
    times = {file: file.stat().st_mtime_ns for file in cache.rglob("*.bin")}
    assert len(times) == 2
    load(config, "heldout")
    assert {file: file.stat().st_mtime_ns for file in cache.rglob("*.bin")} == times
    (Path(config.data.corpus) / "0.txt").write_text("changed")
    assert load(config).fingerprint != first.fingerprint
    assert not (tmp_path / "runs").exists()


def test_two_loaders_at_once_share_the_work(config: Config) -> None:
    prints = []
    threads = [threading.Thread(target=lambda: prints.append(load(config).fingerprint)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(prints) == 4
    assert len(set(prints)) == 1
    assert len(list((Path(config.run.root) / ".tokens").iterdir())) == 1


def test_prepared_folder_equals_raw_text(config: Config, tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    prepare(make_plan([config.data.corpus], tokenizer), tmp_path / "out", tokenizer, quiet=True)
    prepared = replace(config, data=replace(config.data, corpus=str(tmp_path / "out")))
    assert same(load(prepared).batch(4), load(config).batch(4))
    assert load(prepared).fingerprint == load(config).fingerprint


def test_tokenizers_that_do_not_fit(config: Config, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text(train_bpe(iter(["abab cdcd efgh"] * 9), 264).to_str())
    tokenizer = JsonTokenizer(file)
    out = tmp_path / "out"
    prepare(make_plan([config.data.corpus], tokenizer), out, tokenizer, quiet=True)
    wrong = replace(config, data=replace(config.data, corpus=str(out)))
    with pytest.raises(
        UserError,
        match=rf"prepared with another tokenizer than data.tokenizer=byte; set data.tokenizer={out}/tokenizer.json",
    ):
        load(wrong)
    right = replace(wrong, data=replace(wrong.data, tokenizer=f"{out}/tokenizer.json"))
    assert load(right).vocab_size == tokenizer.vocab_size > 257
    small = replace(right, model=ModelConfig(vocab_size=260))
    with pytest.raises(
        UserError,
        match=rf"model.vocab_size=260: must be at least {tokenizer.vocab_size}, the vocabulary of data.tokenizer=",
    ):
        load(small)


def test_missing_and_unfinished_corpora(config: Config, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone: no such file or folder"):
        load(replace(config, data=replace(config.data, corpus=str(tmp_path / "gone"))))
    (tmp_path / "half" / ".partial").mkdir(parents=True)
    with pytest.raises(UserError, match=r"half: has no manifest.json, so its preparation did not finish"):
        load(replace(config, data=replace(config.data, corpus=str(tmp_path / "half"))))


def test_text_with_a_manifest_of_its_own_is_text(config: Config) -> None:
    (Path(config.data.corpus) / "manifest.json").write_text('{"of": "another project"}')
    assert load(config).num_rows > 0
