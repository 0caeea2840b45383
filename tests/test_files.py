"""Results are written whole or not at all, and what fails says what to do."""

import csv
import errno
import os

import pytest

from moejax.errors import UserError
from moejax.files import result, write_csv, write_result


def test_result_makes_its_folder_and_replaces_the_old_one(tmp_path):
    file = tmp_path / "new/plan.json"
    write_result(file, "first")
    write_result(file, "naïve ☕")
    assert file.read_bytes() == "naïve ☕".encode()
    assert os.listdir(file.parent) == ["plan.json"]


def test_failure_half_way_keeps_the_old_result_alone(tmp_path):
    file = tmp_path / "picture.svg"
    write_result(file, "old")

    def text():
        yield b"new"
        raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"), result(file) as out:
        out.writelines(text())
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["picture.svg"]


def test_full_disk_keeps_the_old_result_and_says_so(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "plan.html"
    write_result(file, "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"the disk is full \(\d+ MiB free\); free some space or give a folder"):
        write_result(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.html"]


def test_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "plans").write_text("")
    with pytest.raises(UserError, match=r"plans.*: .*; give a folder that can be written"):
        write_result(tmp_path / "plans/plan.json", "{}")


def test_csv_holds_every_row(tmp_path):
    rows = [{"name": "a, b", "value": 1.5}, {"name": 'say "c"', "value": ""}]
    write_csv(tmp_path / "rows.csv", rows)
    with (tmp_path / "rows.csv").open(newline="", encoding="utf-8") as stream:
        assert list(csv.DictReader(stream)) == [{"name": "a, b", "value": "1.5"}, {"name": 'say "c"', "value": ""}]
