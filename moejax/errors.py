"""The one exception that means "the user can fix this"."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input: one line that says what is wrong and what to do. The CLI exits with code 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the known word closest to `word`, or an empty string."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{match[0]}'?" if match else ""
