"""Pictures as SVG text: horizontal bars, and lines over a logarithmic axis."""

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#3366aa", "#cc6633", "#339966", "#aa3355", "#8866aa", "#777733", "#338899", "#996633", "#555555")


def bars(title: str, rows: Mapping[str, float], texts: Sequence[str], limit: float | None = None) -> str:
    """One bar for each row.

    Args:
        title: Above the picture.
        rows: Length of each bar by its name, in the order of the picture.
        texts: What stands at the end of each bar.
        limit: A line across the bars, as their sum must not pass it; None for none.
    """
    longest = max([*rows.values(), limit or 0.0, 1e-30])
    height = 40 + 26 * len(rows)
    parts = [f'<text x="10" y="20" class="t">{escape(title)}</text>']
    for index, ((name, size), text) in enumerate(zip(rows.items(), texts, strict=True)):
        y, width = 34 + 26 * index, 420 * size / longest
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<text x="190" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="200" y="{y}" width="{max(width, 0.5):.1f}" height="18" fill="{colour}"/>')
        parts.append(f'<text x="{206 + width:.1f}" y="{y + 14}">{escape(text)}</text>')
    if limit is not None:
        x = 200 + 420 * limit / longest
        parts.append(f'<line x1="{x:.1f}" y1="28" x2="{x:.1f}" y2="{height - 6}" stroke="#aa0000"/>')
    return _svg(760, height, parts)


def lines(title: str, curves: Mapping[str, Sequence[tuple[float, float]]], x_name: str, y_name: str) -> str:
    """Curves over a logarithmic x axis, y from zero.

    Args:
        title: Above the picture.
        curves: Points (x, y) of each curve by its name; x greater than zero.
        x_name: Under the x axis.
        y_name: Beside the title, in brackets.
    """
    points = [point for curve in curves.values() for point in curve]
    low, high = (math.log2(pick(x for x, _ in points)) for pick in (min, max))
    top = max(y for _, y in points) * 1.05 or 1.0
    span = (high - low) or 1.0

    def place(x: float, y: float) -> str:
        return f"{60 + 560 * (math.log2(x) - low) / span:.1f},{330 - 280 * y / top:.1f}"

    parts = [f'<text x="10" y="20" class="t">{escape(title)} ({escape(y_name)})</text>']
    parts.append('<path d="M60 50V330H620" fill="none" stroke="#333"/>')
    for step in range(5):
        y = top * step / 4
        parts.append(f'<text x="54" y="{334 - 70 * step}" text-anchor="end">{y:.3g}</text>')
    for x in sorted({x for x, _ in points}):
        left = place(x, 0).partition(",")[0]
        parts.append(f'<text x="{left}" y="348" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="340" y="368" text-anchor="middle">{escape(x_name)}</text>')
    for index, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(place(x, y) for x, y in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{at.split(",")[0]}" cy="{at.split(",")[1]}" r="3" fill="{colour}"/>' for at in path.split()
        ]
        parts.append(f'<text x="634" y="{60 + 18 * index}" fill="{colour}">{escape(name)}</text>')
    return _svg(860, 380, parts)


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    style = "<style>text{font:13px sans-serif}.t{font-weight:bold;font-size:15px}</style>"
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{background}{"".join(parts)}</svg>\n'
