"""Numbers as people read them."""

from collections.abc import Sequence


def of_bytes(count: float) -> str:
    """Bytes in binary units, as in `1.50 GiB`."""
    number, unit = _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    return f"{number:.0f} B" if unit == "B" else f"{number:.2f} {unit}"


def of_count(count: float) -> str:
    """A large number in decimal units, as in `46.7B`: thousand, million, billion, trillion, 10^15."""
    number, unit = _scaled(count, 1000, ("", "K", "M", "B", "T", "P"))
    return f"{number:.3g}{unit}" if unit and abs(number) < 100 else f"{number:.0f}{unit}"


def of_seconds(seconds: float) -> str:
    """Seconds with a fitting unit, as in `1.50 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "-"


def _scaled(number: float, step: int, units: Sequence[str]) -> tuple[float, str]:
    power = 0
    while abs(number) >= step and power < len(units) - 1:
        number, power = number / step, power + 1
    return number, units[power]
