"""Checks of values, with the dotted key in the message."""

from math import inf

from moejax.errors import UserError


def require(ok: bool, key: str, value: object, want: str) -> None:
    """Raise `UserError` unless `ok`."""
    if not ok:
        raise UserError(f"{key}={value}: must be {want}")


def positive(section: str, obj: object, *names: str) -> None:
    """Demand numbers above zero."""
    for name in names:
        value = getattr(obj, name)
        require(0 < value < inf, f"{section}.{name}", value, "greater than zero")


def not_negative(section: str, obj: object, *names: str) -> None:
    """Demand numbers that are zero or above."""
    for name in names:
        value = getattr(obj, name)
        require(0 <= value < inf, f"{section}.{name}", value, "zero or greater")
