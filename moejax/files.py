"""Writing files: all or nothing, and with errors that say what to do."""

import csv
import errno
import io
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from moejax.errors import UserError


@contextmanager
def replacing(file: Path) -> Iterator[IO[bytes]]:
    """Write a file under a temporary name; rename it when the block succeeds, delete it when it fails.

    Args:
        file: Where the file shall be. Until the end of the block nothing is there, or the old file is.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def readable_errors(folder: Path) -> Iterator[None]:
    """Turn failures to write in `folder` into `UserError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(
                f"{folder}: the disk is full ({_free(folder)} MiB free); free some space or give a folder on another"
                " disk, then run the same again"
            ) from error
        where = error.filename or folder
        raise UserError(f"{where}: {error.strerror or error}; give a folder that can be written") from error


@contextmanager
def result(file: Path) -> Iterator[IO[bytes]]:
    """Write a file that somebody asked for, and its folder: `replacing`, with failures as `UserError`."""
    with readable_errors(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as out:
            yield out


def write_result(file: Path, text: str) -> None:
    """Write a text that somebody asked for, in UTF-8."""
    with result(file) as out:
        out.write(text.encode())


def write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same keys as CSV; the keys are the first line."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_result(file, text.getvalue())


def _free(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free // 2**20
