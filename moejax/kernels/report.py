"""Writes measurements of kernels as CSV and as a picture."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from moejax import files
from moejax.kernels.bench import DIRECTIONS, Measurement


def write_csv(measurements: Sequence[Measurement], path: Path) -> None:
    """One line per measurement, the case's fields spread out."""
    lines = []
    for measurement in measurements:
        line = asdict(measurement)
        lines.append({**line.pop("case"), **line})
    files.write_csv(path, lines)


def draw(measurements: Sequence[Measurement], path: Path) -> None:
    """TFLOP/s over rows per expert, a panel per direction and load, a line per candidate. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    loads = list(dict.fromkeys(m.case.load for m in measurements))
    figure, panels = plt.subplots(
        len(loads), len(DIRECTIONS), figsize=(4 * len(DIRECTIONS), 3.2 * len(loads)), squeeze=False, sharex=True
    )
    names = list(dict.fromkeys(m.candidate for m in measurements))
    for load, row in zip(loads, panels, strict=True):
        for direction, panel in zip(DIRECTIONS, row, strict=True):
            for index, name in enumerate(names):
                line = [
                    (m.case.rows, m.tflops)
                    for m in measurements
                    if (m.case.load, m.direction, m.candidate) == (load, direction, name)
                ]
                if line:
                    style = "k--" if name == "dense" else f"C{index}o-"
                    panel.plot(*zip(*line, strict=True), style, label=name, markersize=4)
            panel.set_xscale("log", base=2)
            panel.set_title(f"{direction}, {load} load")
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("rows per expert")
    for row in panels:
        row[0].set_ylabel("TFLOP/s")
    panels[0][0].legend()
    case = measurements[0].case
    figure.suptitle(f"{measurements[0].device}: {case.groups} experts, D {case.width}, F {case.hidden}, {case.dtype}")
    figure.tight_layout()
    with files.result(path) as out:
        figure.savefig(out, dpi=110)
    plt.close(figure)
