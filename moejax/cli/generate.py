"""`moejax generate`: text that continues a prompt, from a run's newest checkpoint."""

import argparse
import json
from typing import Any

from moejax.cli.main import add_config_arguments, run_config_from
from moejax.errors import UserError


def register(subparsers: Any) -> None:
    """Add `generate`."""
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt with a run's model",
        description="Sample text from the newest checkpoint of a run, on one device.",
        epilog="example: moejax generate runs/quickstart --prompt 'def main('",
    )
    add_config_arguments(parser, "RUN")
    parser.add_argument("--prompt", default="", help="text to continue (default: the start of a document)")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens to sample at most (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 for the likeliest token (default 0.8)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        help="sample from the likeliest tokens of this total probability (default 0.95)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with step, prompt and text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Sample and print; return the exit code."""
    for flag, ok, want in (
        ("max-tokens", args.max_tokens > 0, "greater than zero"),
        ("temperature", args.temperature >= 0, "zero or greater"),
        ("top-p", 0 < args.top_p <= 1, "above 0 and at most 1"),
    ):
        if not ok:
            raise UserError(f"--{flag}: must be {want}")
    config = run_config_from(args)
    from moejax.train.sample import sample_run

    result = sample_run(
        config, args.prompt, max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed
    )
    print(json.dumps({"prompt": args.prompt, **result}) if args.json else args.prompt + result["text"])
    return 0
