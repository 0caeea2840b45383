"""`moejax plan`: what a run costs, before it runs and without its devices."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from moejax.cli.main import add_config_arguments, config_from
from moejax.errors import UserError
from moejax.files import write_result


def register(subparsers: Any) -> None:
    """Add `plan`."""
    parser = subparsers.add_parser(
        "plan",
        help="parameters, FLOPs, memory, traffic and time before training",
        description="Show what a run costs before it runs: parameters, the storage and compute layout of every "
        "tensor on the mesh, FLOPs, memory and traffic per device; and for a target machine the estimated time of a "
        "step, whether it fits, and what would help. The devices need not be there. Writes plan.json and plan.html.",
        epilog="example: moejax plan configs/models/olmoe-1b-7b.yaml --target h200x8",
    )
    add_config_arguments(parser)
    parser.add_argument("--target", metavar="T", help="machine: cpu, h200x8, v5p, ... (a wrong name lists all)")
    parser.add_argument("--chips", type=int, metavar="N", help="devices: changes mesh.data, same work for each")
    parser.add_argument("--compile", action="store_true", help="compile the step for the target, and compare")
    parser.add_argument("--search", action="store_true", help="rank layouts that fit the target by estimated time")
    parser.add_argument("--out", metavar="DIR", help="folder of plan.json and plan.html (default: plans/NAME)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables, and write only with --out"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan; return the exit code."""
    config = config_from(args)
    for flag in ("compile", "search"):
        if getattr(args, flag) and not args.target:
            raise UserError(f"--{flag}: needs a machine; add --target, for example --target v5p")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # shapes are all it takes; leave accelerators to those who train
    import jax

    from moejax.plan.report import make_report, with_devices
    from moejax.plan.show import show_report
    from moejax.plan.target import read_target

    target = read_target(args.target) if args.target else None
    config = with_devices(config, args.chips) if args.chips is not None else config
    if target is not None and target.platform == "cpu" and args.compile:
        jax.config.update("jax_num_cpu_devices", config.mesh.size)
    compiled = None
    if target is not None and args.compile:
        from moejax.plan.compile import compile_step

        compiled = compile_step(config, target)
    report = make_report(config, target, compiled)
    if args.search:
        report["search"] = _search(config, target)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        show_report(report)
    if args.out or not args.json:
        _write(report, Path(args.out or Path("plans") / config.run.name), quiet=args.json)
    return 0


def _search(config: Any, target: Any) -> list[dict[str, Any]]:
    from moejax.plan.report import candidate_dict
    from moejax.plan.search import search

    return [candidate_dict(item) for item in search(config, target)[:10]]


def _write(report: dict[str, Any], folder: Path, quiet: bool) -> None:
    from moejax.plan.page import make_page

    write_result(folder / "plan.json", json.dumps(report, indent=2) + "\n")
    write_result(folder / "plan.html", make_page(report))
    if not quiet:
        print(f"written: {folder / 'plan.json'}, {folder / 'plan.html'}")
