"""`moejax inspect`: how a run's tokens spread over experts, and where the time of its steps goes."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moejax.errors import UserError
from moejax.files import result

if TYPE_CHECKING:
    import numpy as np

SHADES = " .:-=+*#%@"
"""Characters of a heat map, least first."""

COLUMNS = 64
"""Most steps side by side in a heat map of characters."""


def register(subparsers: Any) -> None:
    """Add `inspect`."""
    parser = subparsers.add_parser(
        "inspect", help="look into a run", description="Look into a run.", epilog="example: moejax inspect routing RUN"
    )
    topics = parser.add_subparsers(dest="topic", metavar="TOPIC", required=True)
    routing = topics.add_parser(
        "routing",
        help="load of experts over layers and steps",
        description="Draw the load of experts, as requested by the router, over layers and logged steps.",
        epilog="example: moejax inspect routing runs/quickstart --png routing.png",
    )
    routing.add_argument("folder", metavar="RUN", help="folder of a run")
    routing.add_argument("--png", metavar="FILE", help="also write pictures, with the load of every expert")
    routing.set_defaults(run=run_routing)
    trace = topics.add_parser(
        "trace",
        help="time of traced steps, by part of the step",
        description="Sum up a trace that 'moejax train --profile' wrote: time by named scope, model time and taxes.",
        epilog="example: moejax inspect trace runs/quickstart",
    )
    trace.add_argument("folder", metavar="RUN", help="folder of a run, or one that holds its trace")
    trace.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    trace.set_defaults(run=run_trace)


def run_routing(args: argparse.Namespace) -> int:
    """Print a heat map of characters, and write a picture if asked; return the exit code."""
    import numpy as np

    steps, requested_SLE, pairs = read_requested(Path(args.folder))
    mean = np.maximum(requested_SLE.mean(axis=2), 1e-9)
    load_LS = (requested_SLE.max(axis=2) / mean).T
    dead_LS = (requested_SLE == 0).sum(axis=2).T
    print(f"requested load of {args.folder}: {len(load_LS)} MoE layers, {requested_SLE.shape[2]} experts")
    print("most loaded expert over the mean (1 is balanced)")
    print(heat_map(load_LS, steps))
    print(f"last step: {', '.join(f'layer {i}: {row[-1]:.2f}' for i, row in enumerate(load_LS))}")
    print(f"experts without a token in the last step: {', '.join(str(row[-1]) for row in dead_LS)}")
    if pairs is not None:
        print(pair_table(pairs))
    if args.png:
        draw(steps, requested_SLE, load_LS, Path(args.png))
        print(f"pictures in {args.png}")
    return 0


def run_trace(args: argparse.Namespace) -> int:
    """Print the time of traced steps by scope; return the exit code."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from moejax.plan.trace import read_trace, show_trace

    trace = read_trace(args.folder)
    if args.json:
        print(json.dumps(trace.as_dict(), indent=2))
    else:
        show_trace(trace)
    return 0


def read_requested(folder: Path) -> "tuple[list[int], np.ndarray, np.ndarray | None]":
    """Of a run's metrics: logged steps, requested routes [steps, layers, experts], and the last `moe/pairs`, if any."""
    import numpy as np

    from moejax.train.metrics import read_rows

    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder}: no metrics.jsonl in there; name the folder of a run")
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row.get("moe/requested")]
    if not rows:
        raise UserError(f"{folder}: no routing was logged; train a model with ffn: moe for at least log.every steps")
    pairs = [row["moe/pairs"] for row in rows if row.get("moe/pairs")]
    requested = np.asarray([row["moe/requested"] for row in rows], float)
    return [row["step"] for row in rows], requested, np.asarray(pairs[-1]) if pairs else None


def pair_table(pairs_LSP: "np.ndarray") -> str:
    """Text: share of each source rank's routes that goes to each destination rank, over all layers."""
    import numpy as np

    total_SP = pairs_LSP.sum(axis=0)
    share_SP = total_SP / np.maximum(total_SP.sum(axis=1, keepdims=True), 1)
    rows = [f"from {s:3d} | {' '.join(f'{share:4.0%}' for share in row)}" for s, row in enumerate(share_SP)]
    return "\n".join(["routes of the last step from rank (line) to rank (column), all layers", *rows])


def heat_map(values_LS: "np.ndarray", steps: list[int]) -> str:
    """Text with one line a layer and one character a step, from 1 to the largest value; long runs are thinned."""
    import numpy as np

    chosen = np.unique(np.linspace(0, len(steps) - 1, min(COLUMNS, len(steps))).round().astype(int))
    top = max(values_LS.max(), 1 + 1e-9)
    level = np.clip((values_LS[:, chosen] - 1) / (top - 1) * (len(SHADES) - 1), 0, len(SHADES) - 1).round().astype(int)
    lines = [f"layer {i:3d} |{''.join(SHADES[v] for v in row)}|" for i, row in enumerate(level)]
    return "\n".join([*lines, f"steps {steps[0]} to {steps[-1]}; ' ' is 1, '{SHADES[-1]}' is {top:.2f}"])


def draw(steps: list[int], requested_SLE: "np.ndarray", load_LS: "np.ndarray", path: Path) -> None:
    """Write a picture: layers by steps, and for each layer experts by steps as multiples of the mean."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("--png: matplotlib is not installed: pip install matplotlib, or leave --png out") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    layers, columns = len(load_LS), min(4, len(load_LS))
    height = 1 + -(-layers // columns)
    figure = plt.figure(figsize=(3.5 * columns, 2.4 * height), layout="constrained")
    grid = figure.add_gridspec(height, columns)
    panels = [(figure.add_subplot(grid[0, :]), load_LS, "layer", "most loaded expert / mean")]
    for i in range(layers):
        share_ES = (requested_SLE[:, i] / np.maximum(requested_SLE[:, i].mean(axis=1, keepdims=True), 1e-9)).T
        panels.append(
            (figure.add_subplot(grid[1 + i // columns, i % columns]), share_ES, "expert", f"layer {i}: load / mean")
        )
    for axes, values, label, title in panels:
        extent = (steps[0], max(steps[-1], steps[0] + 1), len(values) - 0.5, -0.5)
        image = axes.imshow(values, aspect="auto", interpolation="nearest", extent=extent, vmin=0, cmap="viridis")
        axes.set(xlabel="step", ylabel=label, title=title)
        figure.colorbar(image, ax=axes)
    try:
        with result(path) as out:
            figure.savefig(out, dpi=120, format=path.suffix[1:] or None)
    except ValueError as error:
        raise UserError(f"--png {path}: {error}; name a file ending in .png") from error
    plt.close(figure)
