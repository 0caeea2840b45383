"""`moejax bench roofline | capacity | accumulation`: the report's figures 2, 4 and 8a. Not a verb of its own."""

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moejax.cli.main import add_config_arguments, config_from
from moejax.errors import UserError
from moejax.files import write_csv, write_result

if TYPE_CHECKING:
    from moejax.plan.figures import Row


def register(kinds: Any) -> None:
    """Add the figures to the kinds of `bench`."""
    roofline = kinds.add_parser(
        "roofline",
        help="why equal FLOPs are not equal time (figure 2)",
        description="Attainable part of peak of an FFN's forward pass against its tokens, dense and with experts of "
        "equal FLOPs, from a roofline. Writes roofline.csv and roofline.svg.",
        epilog="example: moejax bench roofline --experts 128 --top-k 8 --width 4096 --hidden 1536 --target h200x8",
    )
    for flag, value, text in (
        ("--experts", 64, "routed experts"),
        ("--top-k", 4, "experts of a token"),
        ("--width", 4096, "model width"),
        ("--hidden", 4096, "hidden width of an expert"),
    ):
        roofline.add_argument(flag, type=positive, default=value, help=f"{text} (default: {value})")
    roofline.add_argument("--target", default="b300x8", help="machine (default: b300x8)")
    roofline.add_argument("--out", default="bench", help="folder of the results (default: bench)")
    roofline.set_defaults(run=run_roofline)
    _add_experiment(
        kinds,
        "capacity",
        "throughput against the number of experts (figure 4)",
        "Tokens per second against the number of routed experts at fixed active size: weights gathered once a step "
        "or in every layer (FSDP), each with and without expert parallelism, and a dense reference.",
        ("--experts", [8, 16, 32, 64, 128], "numbers of routed experts"),
        run_capacity,
    )
    _add_experiment(
        kinds,
        "accumulation",
        "throughput against accumulated microbatches (figure 8a)",
        "Tokens per second against the number of microbatches of one shape: weights gathered once a step, or in "
        "every layer (FSDP); without expert parallelism.",
        ("--microbatches", [1, 2, 4, 8, 16], "numbers of microbatches"),
        run_accumulation,
    )


def _add_experiment(
    kinds: Any, name: str, text: str, description: str, over: tuple[str, list[int], str], run: Any
) -> None:
    more = f" Runs on this machine's devices, or plans for a target. Writes {name}.csv and {name}.svg."
    example = f"example: moejax bench {name} configs/bench-capacity.yaml --steps 3"
    parser = kinds.add_parser(name, help=text, description=description + more, epilog=example)
    add_config_arguments(parser)
    flag, values, what = over
    parser.add_argument(flag, type=positive, nargs="+", default=values, help=f"{what} (default: {values})")
    parser.add_argument("--target", help="plan for this machine instead of measuring on this one")
    parser.add_argument("--steps", type=positive, default=3, help="steps of each of a point's two visits (default: 3)")
    parser.add_argument("--out", default="bench", help="folder of the results (default: bench)")
    parser.set_defaults(run=run)


def positive(text: str) -> int:
    """A whole number greater than zero, from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number greater than zero")
    return int(text)


def run_roofline(args: argparse.Namespace) -> int:
    """Draw figure 2."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from moejax.plan.figures import roofline_rows
    from moejax.plan.roofline import Pair
    from moejax.plan.svg import lines
    from moejax.plan.target import read_target

    if args.top_k > args.experts:
        raise UserError(f"--top-k={args.top_k}: must be at most --experts={args.experts}")
    balance = read_target(args.target).balance
    pair = Pair(args.top_k, args.width, args.hidden, args.experts)
    dense = Pair(args.top_k, args.width, args.hidden)
    rows = roofline_rows(pair, balance, [2**n for n in range(4, 17)])
    out = Path(args.out)
    write_csv(out / "roofline.csv", rows)
    curves = {name: [(row["tokens"], row[name]) for row in rows] for name in ("dense", "moe")}
    title = f"{args.experts} experts, {args.top_k} of a token, on {args.target}"
    write_result(out / "roofline.svg", lines(title, curves, "tokens", "part of peak"))
    first = [found.tokens_to_ceiling(balance) for found in (dense, pair)]
    first = [f"{math.ceil(tokens):,} tokens" if math.isfinite(tokens) else "never" for tokens in first]
    print(f"{args.target}: {balance:.1f} FLOP per byte; peak is reached from {first[0]} (dense), {first[1]} (experts)")
    ratios = {name: size / dense.traffic(1e4)[name] for name, size in pair.traffic(1e4).items()}
    print("bytes against dense: " + ", ".join(f"{name} {ratio:g}x" for name, ratio in ratios.items()))
    print(f"written: {out / 'roofline.csv'}, {out / 'roofline.svg'}")
    return 0


def run_capacity(args: argparse.Namespace) -> int:
    """Draw figure 4."""
    return _experiment(args, "capacity", "experts", args.experts)


def run_accumulation(args: argparse.Namespace) -> int:
    """Draw figure 8a."""
    return _experiment(args, "accumulation", "microbatches", args.microbatches)


def _experiment(args: argparse.Namespace, name: str, key: str, values: list[int]) -> int:
    config = config_from(args)
    if args.target:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from moejax.plan import figures
    from moejax.plan.target import read_target

    target = read_target(args.target) if args.target else None
    runs = figures.capacity_runs if name == "capacity" else figures.accumulation_runs
    rows: list[Row] = []
    points = list(runs(config, values))
    configs = [run for _, _, run in points]
    if not target:
        print(f"{len(points)} runs, visited twice in turn; the first visits compile, and print nothing", flush=True)
    results = (
        (figures.plan_run(run, target) for run in configs) if target else figures.measure_runs(configs, args.steps)
    )
    for (variant, value, run), found in zip(points, results, strict=True):
        peak = target.peak["bfloat16"] * target.share(run.mesh.size) if target else None
        rows.append(figures.row_of(variant, key, value, run, found, peak))
        print(f"{variant:>14}  {key} {value:>4}  {found.tokens_per_second:12,.0f} tokens/s", flush=True)
    out = Path(args.out)
    write_csv(out / f"{name}.csv", rows)
    where = f"planned for {args.target}" if target else "measured"
    figures.picture(f"{name}: {where}", rows, key, "tokens_per_second", out / f"{name}.svg")
    for variant, share in figures.retained(rows, key).items():
        print(f"{variant}: {share:.0%} of its tokens/s at {key} {values[0]} remain at {values[-1]}")
    print(f"written: {out / f'{name}.csv'}, {out / f'{name}.svg'}")
    return 0
