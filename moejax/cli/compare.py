"""`moejax compare`: what two runs needed to reach the same loss."""

import argparse
import json
import math
import os
from typing import Any

from moejax.errors import UserError


def register(subparsers: Any) -> None:
    """Add `compare`."""
    parser = subparsers.add_parser(
        "compare",
        help="what two runs needed to reach the same loss",
        description="Align the loss curves of two runs by tokens, FLOPs and time, and print what each needed to "
        "reach a loss: the cross-entropy of the next token, without auxiliary losses. rho_H is the ratio of "
        "device-hours: below 1, run A was cheaper.",
        epilog="example: moejax compare runs/moe runs/dense --smooth 10",
    )
    parser.add_argument("a", metavar="RUN_A", help="folder of a run")
    parser.add_argument("b", metavar="RUN_B", help="folder of the run to compare it with")
    parser.add_argument("--loss", type=float, help="loss to reach (default: the lowest that both reached)")
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help="average over N logged steps (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare; return the exit code."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from moejax.plan.compare import compare, read_curve
    from moejax.plan.show import make_console, make_table
    from moejax.plan.text import of_count, of_seconds

    a, b = read_curve(args.a, args.smooth), read_curve(args.b, args.smooth)
    found = compare(a, b, args.loss)
    if not math.isfinite(found["rho_H"]):
        raise UserError(f"--loss={found['loss']:.4f}: not reached by both runs; leave it out for the lowest that was")
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    table = make_table(f"to reach loss {found['loss']:.4f}", "", args.a, args.b, "ratio")
    for name, show in (("tokens", of_count), ("flops", of_count), ("seconds", of_seconds)):
        table.add_row(name, show(found["a"][name]), show(found["b"][name]), f"{found['ratios'][name]:.3f}")
    hours = (f"{found[side]['device_hours']:.3g}" for side in ("a", "b"))
    table.add_row("device-hours", *hours, f"rho_H {found['rho_H']:.3f}")
    console = make_console()
    console.print(table)
    f, r = found["ratios"]["flops"], found["ratios"]["flops_per_device_second"]
    console.print(f"rho_H = FLOPs {f:.3f} x speed 1 / {r:.3f}")
    return 0
