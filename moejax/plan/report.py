"""The plan of a run as one JSON object, and as tables."""

from typing import Any

from rich.console import Console
from rich.table import Table

from moejax.axes import AXES
from moejax.config import Config
from moejax.plan.memory import state_memory
from moejax.plan.parameters import module_counts
from moejax.plan.tensors import tensors
from moejax.plan.text import of_bytes, of_count

WIDTH = 160
"""Columns of tables that go to a file or a pipe."""


def make_report(config: Config) -> dict[str, Any]:
    """Everything that is known of a run without compiling it.

    Raises:
        UserError: The sharding rules do not fit the model and the mesh.
    """
    found = tensors(config)
    return {
        "run": config.run.name,
        "parameters": module_counts(config).as_dict(),
        "mesh": dict(zip(AXES, config.mesh.shape, strict=True)),
        "devices": config.mesh.size,
        "gather": config.weights.gather,
        "memory": state_memory(config, found),
        "tensors": [tensor.as_dict() for tensor in found],
    }


def make_console() -> Console:
    """A console on standard output; wide where no terminal says how wide it is, so that tables do not break."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=WIDTH)


def show_report(report: dict[str, Any], console: Console | None = None) -> None:
    """Print a report as tables."""
    console = console or make_console()
    show_parameters(report["parameters"], console)
    sizes = " x ".join(f"{axis} {size}" for axis, size in report["mesh"].items() if size > 1) or "one device"
    console.print(f"mesh: {sizes} ({report['devices']} devices), weights.gather: {report['gather']}\n")
    console.print(_tensor_table(report["tensors"]))
    console.print(_memory_table(report["memory"]))


def show_parameters(counts: dict[str, Any], console: Console) -> None:
    """Print total and active parameters, and total by part."""
    console.print(
        f"parameters: {counts['total']:,} total, {counts['active']:,} active "
        f"({counts['active_without_embedding']:,} without the embedding, "
        f"{counts['active_without_embedding_and_head']:,} without embedding and head)"
    )
    console.print(f"active share: {counts['alpha_P']:.1%}, capacity gap: {counts['capacity_gap']:.2f}")
    console.print("by part: " + ", ".join(f"{part} {of_count(size)}" for part, size in counts["parts"].items()))


def _spec(axes: list[list[str]]) -> str:
    return " . ".join("+".join(names) if names else "-" for names in axes)


def _tensor_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="tensors, bytes per device", title_justify="left")
    for name in ("tensor", "shape", "storage", "compute"):
        table.add_column(name, overflow="fold")
    for name in ("main", "optimizer", "compute bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for row in rows:
        sizes = (of_bytes(row[key]) for key in ("main_bytes", "optimizer_bytes", "compute_bytes"))
        shape = "x".join(map(str, row["shape"]))
        layouts = (_spec(row["storage_spec"]), _spec(row["compute_spec"]))
        table.add_row(row["name"], shape, *layouts, *sizes, row["note"])
    return table


def _memory_table(memory: dict[str, int]) -> Table:
    table = Table(title="memory per device", title_justify="left")
    table.add_column("class")
    table.add_column("bytes", justify="right")
    for name, size in memory.items():
        table.add_row(name, of_bytes(size))
    table.add_section()
    table.add_row("together", of_bytes(sum(memory.values())))
    return table
