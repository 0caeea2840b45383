"""`moejax eval`: loss and bits per byte of a run's newest checkpoint on held-out text."""

import argparse
import json
from typing import Any

from moejax.cli.main import add_config_arguments, run_config_from


def register(subparsers: Any) -> None:
    """Add `eval`."""
    parser = subparsers.add_parser(
        "eval",
        help="evaluate a run on held-out text",
        description="Evaluate the newest checkpoint of a run on held-out text. It does not disturb a run that trains.",
        epilog="example: moejax eval runs/quickstart --eval.batches=32",
    )
    add_config_arguments(parser, "RUN")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate and print; return the exit code."""
    config = run_config_from(args)
    from moejax.train.evaluate import evaluate_run

    result = evaluate_run(config)
    if args.json:
        print(json.dumps(result))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("metric", "value", title=f"held-out text at step {result['step']}", title_justify="left")
    table.add_row("loss", f"{result['eval/loss']:.4f}")
    table.add_row("bits per byte", f"{result['eval/bits_per_byte']:.4f}")
    Console().print(table)
    return 0
