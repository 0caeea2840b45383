"""A plan as tables."""

import shlex
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from moejax.plan.text import NO_CHANGE, of_bytes, of_count, of_flops, of_seconds, of_state, of_tax

WIDTH = 160
"""Columns of tables that go to a file or a pipe."""


def make_console() -> Console:
    """A console on standard output; wide where no terminal says how wide it is, so that tables do not break."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=WIDTH)


def make_table(title: str, *columns: str, left: int = 1) -> Table:
    """A table whose first columns are text and whose others are numbers."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        text = index < left
        table.add_column(name, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    return table


def show_report(report: dict[str, Any], console: Console | None = None) -> None:
    """Print a report."""
    console = console or make_console()
    _parameters(report["parameters"], console)
    sizes = " x ".join(f"{axis} {size}" for axis, size in report["mesh"].items() if size > 1) or "one device"
    console.print(f"mesh: {sizes} ({report['devices']} devices), weights.gather: {report['gather']}\n")
    if "stages" in report:
        _stages(report["stages"], console)
    console.print(_tensors(report["tensors"]))
    console.print(_flops(report["flops"]))
    console.print(_memory(report))
    if report["bytes_per_parameter"]:
        console.print(of_state(report["bytes_per_parameter"]), markup=False)
    console.print(_traffic(report))
    if "cost" in report:
        console.print(_cost(report["cost"]))
        console.print(of_tax(report["cost"]), markup=False)
        console.print(f"{report['target']}: {report['fit']['verdict']}")
        console.print(f"largest microbatch that fits: {report['fit']['largest_microbatch']} sequences per device")
        for item in report["improvements"]:
            fits = "" if report["fit"]["fits"] else "fits, "
            console.print(
                f"  {fits}{item['speedup'] - 1:+.0%} tokens/s with {shlex.join(item['change'])}", markup=False
            )
        if not report["fit"]["fits"] and not report["improvements"]:
            console.print(NO_CHANGE)
    if "search" in report:
        show_search(report["search"], console)
    if "compiled" in report:
        compiled = report["compiled"]
        line = compiled["memory_difference"]
        console.print(f"compiled in {compiled['seconds']:.0f} s")
        console.print(compiled["traffic_difference"], markup=False, soft_wrap=True)
        console.print(line, style="bold yellow" if line.startswith("warning") else None, markup=False, soft_wrap=True)


def show_search(found: Sequence[dict[str, Any]], console: Console | None = None) -> None:
    """Print candidates, best first."""
    table = make_table("layouts that fit, quickest first", "options", "step", "tokens/s", "MFU", "memory")
    for item in found:
        speed = (of_seconds(item["step_seconds"]), of_count(item["tokens_per_second"]), f"{item['mfu']:.1%}")
        table.add_row(shlex.join(item["change"]), *speed, of_bytes(item["peak_bytes"]))
    (console or make_console()).print(table)


def _parameters(counts: dict[str, Any], console: Console) -> None:
    console.print(
        f"parameters: {counts['total']:,} total, {counts['active']:,} active "
        f"({counts['active_without_embedding']:,} without the embedding, "
        f"{counts['active_without_embedding_and_head']:,} without embedding and head)"
    )
    alpha_e = "" if counts["alpha_E"] is None else f"alpha_E: {counts['alpha_E']:.2%}, "
    console.print(f"{alpha_e}alpha_P: {counts['alpha_P']:.1%}, capacity gap: {counts['capacity_gap']:.2f}")
    if counts["mtp"]:
        console.print(f"multi-token prediction, in training alone: {counts['mtp']:,} parameters more")
    console.print("by part: " + ", ".join(f"{part} {of_count(size)}" for part, size in counts["parts"].items()))


def _stages(stages: dict[str, Any], console: Console) -> None:
    table = make_table("pipeline stages", "chunk", "stage", "layers", "share of the layers' FLOPs")
    for index, chunk in enumerate(stages["chunks"]):
        layers = f"{chunk['first']} to {chunk['first'] + chunk['layers'] - 1}"
        table.add_row(str(index), str(chunk["stage"]), layers, f"{chunk['share']:.1%}")
    console.print(table)
    console.print(
        f"bubble: {stages['bubble']:.1%} of the time; the largest chunk takes {stages['unevenness']:.2f} times the "
        f"mean; a stage holds the activations of at most {stages['held']} chunks and microbatches\n"
    )


def _spec(axes: list[list[str]]) -> str:
    return " . ".join("+".join(names) if names else "-" for names in axes)


def _tensors(rows: list[dict[str, Any]]) -> Table:
    table = make_table("tensors, bytes per device", "tensor", "shape", "storage", "compute", left=4)
    for name in ("main", "optimizer", "compute bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for row in rows:
        sizes = (of_bytes(row[key]) for key in ("main_bytes", "optimizer_bytes", "compute_bytes"))
        shape = "x".join(map(str, row["shape"]))
        table.add_row(row["name"], shape, _spec(row["storage_spec"]), _spec(row["compute_spec"]), *sizes, row["note"])
    return table


def _flops(flops: dict[str, Any]) -> Table:
    title = f"useful FLOPs of training, {flops['tokens_per_step']:,} tokens a step"
    table = make_table(title, "part", "per token", "per step")
    for part, size in flops["by_part"].items():
        table.add_row(part, of_count(size), of_count(size * flops["tokens_per_step"]))
    table.add_section()
    table.add_row("together", of_count(flops["per_token"]), of_count(flops["per_step"]))
    return table


def _memory(report: dict[str, Any]) -> Table:
    table = make_table("memory per device", "class", "bytes")
    for name, size in report["memory"].items():
        table.add_row(name, of_bytes(size))
    table.add_section()
    table.add_row("together", of_bytes(sum(report["memory"].values())))
    for name, size in report.get("compiled", {}).get("memory", {}).items():
        table.add_row(f"compiler: {name}", of_bytes(size))
    return table


def _traffic(report: dict[str, Any]) -> Table:
    columns = ("class", "operation", "axes", "link", "tensors", "bytes sent", "time")
    table = make_table("traffic of a step, per device", *columns, left=4)
    for move in report["traffic"]:
        time = of_seconds(move["seconds"]) if "seconds" in move else "-"
        what = (move["name"], f"{move['kind']} {move['dtype']}", "+".join(move["axes"]), move.get("link", "-"))
        table.add_row(*what, f"{move['tensors']:,}", of_bytes(move["wire_bytes"]), time)
    table.add_section()
    for name in ("formula", "compiled") if "compiled" in report else ():
        for part, total in report["compiled"]["by_class"][name].items():
            sizes = (f"{total['tensors']:,.0f}", of_bytes(total["wire_bytes"]))
            table.add_row(f"{name}: {part}", "", "", "", *sizes, "")
    return table


def _cost(cost: dict[str, Any]) -> Table:
    table = make_table("estimated time of a step, nothing overlapped", "what", "time", "share")
    step = cost["step_seconds"]
    rows = {"model FLOPs at peak": cost["model_seconds"]}
    rows |= {f"tax: {name}": seconds for name, seconds in cost["tax_seconds"].items()}
    for name, seconds in rows.items():
        table.add_row(name, of_seconds(seconds), f"{seconds / step:.1%}")
    table.add_section()
    table.add_row("step", of_seconds(step), f"MFU {cost['mfu']:.1%}")
    table.add_row("tokens per second", of_count(cost["tokens_per_second"]), "")
    table.add_row("peak of MFU, per device", f"{of_flops(cost['peak'])}/s", "")
    return table
