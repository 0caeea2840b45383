"""`moejax plan`: what a run costs, before it runs and without its devices."""

import argparse
import json
import os
from typing import Any

from moejax.cli.main import add_config_arguments, config_from


def register(subparsers: Any) -> None:
    """Add `plan`."""
    parser = subparsers.add_parser(
        "plan",
        help="count parameters, layouts and memory before training",
        description="Show what a run costs before it runs: parameters, the storage and compute layout of every "
        "tensor on the mesh, and memory per device. The devices of the mesh need not be there.",
        epilog="example: moejax plan configs/quickstart.yaml --mesh.expert=8 --mesh.data=1",
    )
    add_config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan; return the exit code."""
    config = config_from(args)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # shapes are all it takes; leave accelerators to those who train
    from moejax.plan.report import make_report, show_report

    report = make_report(config)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        show_report(report)
    return 0
