"""`moejax train`: train a model, or go on with a run."""

import argparse
import sys
from typing import Any

from moejax.cli.main import add_config_arguments, config_from


def register(subparsers: Any) -> None:
    """Add `train`."""
    parser = subparsers.add_parser(
        "train",
        help="train a model, or go on with a run",
        description="Train a model. The same command goes on with a run that was ended, from its newest checkpoint. "
        "Exit codes: 0 done, 2 bad input, 3 stopped because loss or gradient was not finite three times in a row, "
        "75 ended by SIGTERM with its state saved (start it again).",
        epilog="example: moejax train configs/quickstart.yaml --train.steps=400",
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--profile",
        metavar="START:STOP",
        help="trace these steps, both included, into RUN/profile; 'moejax inspect trace RUN' sums the trace up",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train; return the exit code."""
    config = config_from(args)
    from moejax.plan.meter import Meter
    from moejax.train.guards import Preempted, TrainingStopped
    from moejax.train.trainer import Trainer

    try:
        Trainer(config, make_meter=Meter, profile=args.profile).run()
    except (Preempted, TrainingStopped) as ending:
        print(ending, file=sys.stderr)
        return ending.exit_code
    return 0
