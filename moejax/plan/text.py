"""Numbers as people read them."""


def of_bytes(count: float) -> str:
    """Bytes in binary units, as in `1.50 GiB`."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    unit = ""
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if abs(count) < 1024:
            break
    return f"{count:.2f} {unit}"


def of_count(count: float) -> str:
    """A large number in decimal units, as in `46.7B` (thousand, million, billion, trillion: K, M, B, T)."""
    if abs(count) < 1000:
        return f"{count:.0f}"
    unit = ""
    for unit in ("K", "M", "B", "T", "P"):
        count /= 1000
        if abs(count) < 1000:
            break
    return f"{count:.3g}{unit}" if abs(count) < 100 else f"{count:.0f}{unit}"


def of_seconds(seconds: float) -> str:
    """Seconds with a fitting unit, as in `1.50 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
