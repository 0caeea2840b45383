"""`moejax params`: how large models are, and how much of them one token uses."""

import argparse
import json
import os
from typing import Any

from rich.table import Table


def register(subparsers: Any) -> None:
    """Add `params`."""
    parser = subparsers.add_parser(
        "params",
        help="count the parameters of models",
        description="Count the parameters of models: total, and active (used by one token) by three conventions: "
        "everything; without the input embedding; without embedding and output head. Multi-token prediction stands "
        "apart. Models that the trainer can build are counted from its own module, others from a description.",
        epilog="example: moejax params all --json",
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default="all", help="a preset, a YAML file, or all (the default)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Count; return the exit code."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from moejax.plan.presets import names, read_model
    from moejax.plan.show import make_console

    models = [read_model(name).as_dict() for name in (names() if args.model == "all" else [args.model])]
    if args.json:
        print(json.dumps(models, indent=2))
    else:
        make_console().print(_table(models))
    return 0


def _table(models: list[dict[str, Any]]) -> Table:
    from moejax.plan.text import of_count

    table = Table(caption="difference of active: by the convention that comes nearest", caption_justify="left")
    table.add_column("model")
    for title in (
        "total",
        "active",
        "- embedding",
        "- head",
        "alpha_E",
        "alpha_P",
        "gap",
        "MTP",
        "published",
        "differs",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("counted")
    for model in models:
        alpha_e = "-" if model["alpha_E"] is None else f"{model['alpha_E']:.2%}"
        published, differs = "-", "-"
        if "published_total" in model:
            published = f"{of_count(model['published_total'])} / {of_count(model['published_active'])}"
            differs = f"{model['total_difference']:+.1%} / {model['active_difference']:+.1%}"
        table.add_row(
            model["name"],
            f"{model['total']:,}",
            of_count(model["active"]),
            of_count(model["active_without_embedding"]),
            of_count(model["active_without_embedding_and_head"]),
            alpha_e,
            f"{model['alpha_P']:.2%}",
            f"{model['capacity_gap']:.1f}",
            of_count(model["mtp"]) if model["mtp"] else "-",
            published,
            differs,
            model["source"],
        )
    return table
