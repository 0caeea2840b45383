"""Numbers as people read them."""

from collections.abc import Mapping, Sequence
from typing import Any


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


def of_flops(count: float) -> str:
    """Floating-point operations in decimal units, as in `7.88 GFLOP`."""
    number, unit = _scaled(count, 1000, ("", "k", "M", "G", "T", "P", "E"))
    return f"{number:.3g} {unit}FLOP" if abs(number) < 100 else f"{number:.0f} {unit}FLOP"


def of_state(parts: Mapping[str, Mapping[str, float]]) -> str:
    """One line of `bytes_per_parameter` of a report."""
    names = {"dense": "6 + 12/D", "routed experts": "6/M_E + 12/D"}
    found = (f"{part} {size['layout']:.2f} ({names[part]}: {size['report']:.2f})" for part, size in parts.items())
    return f"bytes of state for each parameter, with accumulators: {', '.join(found)}; 18 if all of it is replicated"


NO_CHANGE = "no single change makes it fit; look for layouts with --search, or take more devices"
"""What a plan advises where `improvements` has nothing for a run that does not fit."""


def of_tax(cost: Mapping[str, Any]) -> str:
    """One line: what dominates the taxes of a step."""
    name = cost["dominates"]
    return f"the largest tax is {name}: {cost['tax_seconds'][name] / cost['step_seconds']:.1%} of the step"


def _scaled(number: float, step: int, units: Sequence[str]) -> tuple[float, str]:
    power = 0
    while abs(number) >= step and power < len(units) - 1:
        number, power = number / step, power + 1
    return number, units[power]
