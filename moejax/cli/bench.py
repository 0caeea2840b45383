"""`moejax bench`: measure on the machine at hand."""

import argparse
import importlib.util
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moejax.cli import bench_figures
from moejax.errors import UserError
from moejax.files import readable_errors, write_result

if TYPE_CHECKING:
    from moejax.kernels.bench import Case, Measurement

ROWS = (16, 64, 256, 1024, 4096, 32768)
PRESETS = {  # experts, D, F, dtype, rounds, seconds per direction, seconds in all
    "cpu": (8, 128, 128, "float32", 9, 0.3, 120.0),
    "gpu": (8, 2048, 1024, "bfloat16", 20, 1.0, math.inf),
    "tpu": (8, 2048, 1024, "bfloat16", 20, 1.0, math.inf),
}


def register(subparsers: Any) -> None:
    """Add `bench` and what it can measure."""
    parser = subparsers.add_parser("bench", help="measure kernels on this machine", description="Measure.")
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    kernels = kinds.add_parser(
        "kernels",
        help="grouped matmuls against dense ones",
        description="Time grouped matmuls in all directions, and an expert FFN forward and backward, beside a dense "
        "matmul of equal FLOPs. Writes kernels.csv and kernels.png; with --tune a table of the best tiles.",
        epilog="example: moejax bench kernels --rows 64 256 --out bench",
    )
    kernels.add_argument("--rows", type=bench_figures.positive, nargs="+", default=ROWS, help="rows per expert")
    kernels.add_argument("--groups", type=bench_figures.positive, help="experts")
    kernels.add_argument("--width", type=bench_figures.positive, help="model width D")
    kernels.add_argument("--hidden", type=bench_figures.positive, help="expert width F")
    kernels.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of the operands")
    kernels.add_argument("--loads", nargs="+", choices=("uniform", "skewed"), default=["uniform", "skewed"])
    kernels.add_argument("--backends", nargs="+", help="backends beside the table's choice (default: all that can run)")
    kernels.add_argument("--rounds", type=bench_figures.positive, help="rounds of measurement, at most")
    kernels.add_argument("--seconds", type=float, help="time per direction after which no round is added")
    kernels.add_argument("--limit", type=float, help="seconds after which nothing more is begun (CPU: 120)")
    kernels.add_argument("--out", default="bench", help="folder of the results (default: bench)")
    kernels.add_argument("--tune", action="store_true", help="measure tiles instead, and write kernel-table.json")
    kernels.set_defaults(run=run)
    bench_figures.register(kinds)


def run(args: argparse.Namespace) -> int:
    """Measure and write; return the exit code."""
    import jax

    from moejax.kernels.bench import Case

    platform = jax.default_backend()
    groups, width, hidden, dtype, rounds, seconds, limit = PRESETS.get(platform, PRESETS["gpu"])
    shape = args.groups or groups, args.width or width, args.hidden or hidden, args.dtype or dtype
    args.rounds, args.seconds = args.rounds or rounds, args.seconds or seconds
    args.deadline = time.monotonic() + (args.limit or limit)
    args.folder = Path(args.out)
    with readable_errors(args.folder):  # before anything is measured
        args.folder.mkdir(parents=True, exist_ok=True)
    cases = [Case(count, *shape, load) for count in sorted(args.rows) for load in args.loads]  # the longest last
    return _tune(args, platform, cases) if args.tune else _measure(args, platform, cases)


def _measure(args: argparse.Namespace, platform: str, cases: "list[Case]") -> int:
    from moejax.kernels.bench import measure
    from moejax.kernels.report import draw, write_csv

    native = [platform] if platform in ("cpu", "gpu", "tpu") else []
    names = args.backends or [*native, "padded", "xla"]
    found: list[Measurement] = []
    for case in cases:
        for measurement in measure(case, names, args.rounds, args.seconds, args.deadline):
            found.append(measurement)
            print(_line(measurement), flush=True)
        if found:
            write_csv(found, args.folder / "kernels.csv")
    _tell_left_out(found, cases)
    print(f"wrote {args.folder / 'kernels.csv'}")
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
        return 0
    draw(found, args.folder / "kernels.png")
    print(f"wrote {args.folder / 'kernels.png'}")
    return 0


def _tell_left_out(found: "list[Measurement]", cases: "list[Case]") -> None:
    from moejax.kernels.bench import DIRECTIONS

    done = {(m.case, m.direction) for m in found}
    late = [(case, direction) for case in cases for direction in DIRECTIONS if (case, direction) not in done]
    if not done:
        raise UserError("nothing was measured: raise --limit, or see the warnings above")
    if late:
        names = ", ".join(f"{case.rows} {case.load} {direction}" for case, direction in late)
        print(f"left out, for want of time (--limit) or by failure: {names}")


def _line(m: "Measurement") -> str:
    peak = "" if m.percent_of_peak is None else f" {m.percent_of_peak:5.1f}% of peak"
    return (
        f"{m.case.rows:6d} rows per expert, {m.case.load} (I_H {m.imbalance:.2f}), {m.direction:8s}{m.candidate:10s}"
        f"{m.seconds * 1e3:10.3f} ms {m.tflops:9.3f} TFLOP/s {m.ratio_to_dense:7.2f} x dense{peak}"
    )


def _tune(args: argparse.Namespace, platform: str, cases: "list[Case]") -> int:
    from moejax.kernels.table import ENVIRONMENT, dump
    from moejax.kernels.tune import TILES, tune

    backends = args.backends or [platform]
    if len(backends) > 1 or backends[0] not in TILES:
        raise UserError(f"--backends {' '.join(backends)}: tiles are tuned for one of {', '.join(TILES)}")
    load = args.loads[0]
    cases = [case for case in cases if case.load == load]
    entries = tune(cases, backends[0], args.rounds, args.seconds, args.deadline)
    path = args.folder / "kernel-table.json"
    write_result(path, dump(entries))
    for entry in entries:
        print(entry)
    print(f"wrote {path}; use it with {ENVIRONMENT}={path}")
    return 0
