"""A plan as one HTML page, with its pictures inside: it opens without a network."""

import shlex
from collections.abc import Sequence
from html import escape
from typing import Any

from moejax.plan.svg import bars
from moejax.plan.text import NO_CHANGE, of_bytes, of_count, of_flops, of_seconds, of_state, of_tax

_STYLE = """
body{font:15px/1.45 sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0;font-size:13px}
td,th{border-bottom:1px solid #ddd;padding:2px 10px;text-align:left}
td.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
"""


def make_page(report: dict[str, Any]) -> str:
    """The page of a report."""
    parts = [*_head(report), *_pictures(report), _traffic(report), *_compiled(report), *_advice(report)]
    parts.append(_tensors(report))
    name = escape(report["run"])
    head = f'<meta charset="utf-8"><title>Plan: {name}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{"".join(parts)}</body></html>\n'


def _head(report: dict[str, Any]) -> list[str]:
    counts, flops = report["parameters"], report["flops"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in report["mesh"].items() if size > 1) or "one device"
    alpha_e = "" if counts["alpha_E"] is None else f"alpha_E {counts['alpha_E']:.2%}, "
    lines = [
        f"{counts['total']:,} parameters, {counts['active']:,} active ({counts['active_without_embedding']:,} without "
        f"the embedding, {counts['active_without_embedding_and_head']:,} without embedding and head): {alpha_e}"
        f"alpha_P {counts['alpha_P']:.1%}, capacity gap {counts['capacity_gap']:.2f}",
        f"{report['devices']} devices ({mesh}), weights.gather: {report['gather']}",
        f"{of_flops(flops['per_token'])} a token, {flops['tokens_per_step']:,} tokens a step",
    ]
    if report["bytes_per_parameter"]:
        lines.append(of_state(report["bytes_per_parameter"]))
    if "cost" in report:
        cost = report["cost"]
        lines.append(
            f"{report['target']}: {of_seconds(cost['step_seconds'])} a step, {of_count(cost['tokens_per_second'])} "
            f"tokens/s, MFU {cost['mfu']:.1%} of {of_flops(cost['peak'])}/s a device (an estimate; nothing overlaps)"
        )
        lines.append(of_tax(cost))
        fit = report["fit"]
        lines += [NO_CHANGE] if not fit["fits"] and not report["improvements"] else []
        lines.append(
            f"{fit['verdict']}; largest microbatch that fits: {fit['largest_microbatch']} sequences per device"
        )
    if "compiled" in report:
        lines += [report["compiled"][name] for name in ("memory_difference", "traffic_difference")]
    return [f"<h1>Plan: {escape(report['run'])}</h1>\n", *(f"<p>{escape(line)}</p>\n" for line in lines)]


def _pictures(report: dict[str, Any]) -> list[str]:
    parts = report["parameters"]["parts"]
    found = [bars("Parameters", parts, [of_count(size) for size in parts.values()])]
    flops = report["flops"]["by_part"]
    found.append(bars("Useful FLOPs of a token", flops, [of_count(size) for size in flops.values()]))
    memory = {**report["memory"], "together": sum(report["memory"].values())}
    if "compiled" in report:
        memory["compiler's peak"] = report["compiled"]["memory"]["peak"]
    limit = report["fit"]["limit"] if "fit" in report else None
    found.append(bars("Memory per device", memory, [of_bytes(size) for size in memory.values()], limit))
    sent: dict[str, float] = {}
    for move in report["traffic"]:
        sent[move["name"]] = sent.get(move["name"], 0.0) + move["wire_bytes"]
    if sent:
        found.append(bars("Bytes that a device sends in a step", sent, [of_bytes(size) for size in sent.values()]))
    if "cost" in report:
        cost = report["cost"]
        times = {"model FLOPs at peak": cost["model_seconds"], **cost["tax_seconds"]}
        shares = [f"{of_seconds(size)}, {size / cost['step_seconds']:.1%}" for size in times.values()]
        found.append(bars("Time of a step: model and taxes", times, shares))
    return found


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], text: int) -> str:
    """A table whose first `text` columns are text."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td{'' if index < text else ' class=n'}>{escape(cell)}</td>" for index, cell in enumerate(row))
        + "</tr>\n"
        for row in rows
    )
    return f"<h2>{escape(title)}</h2>\n<table><tr>{head}</tr>\n{body}</table>\n"


def _traffic(report: dict[str, Any]) -> str:
    rows = []
    for move in report["traffic"]:
        time = of_seconds(move["seconds"]) if "seconds" in move else "-"
        what = [move["name"], f"{move['kind']} {move['dtype']}", "+".join(move["axes"]), move.get("link", "-")]
        rows.append([*what, f"{move['tensors']:,}", of_bytes(move["wire_bytes"]), time])
    columns = ("class", "operation", "axes", "link", "tensors", "bytes sent", "time")
    return _table("Traffic of a step, per device", columns, rows, 4)


def _compiled(report: dict[str, Any]) -> list[str]:
    if "compiled" not in report:
        return []
    formula, seen = (report["compiled"]["by_class"][name] for name in ("formula", "compiled"))
    rows = []
    for part in formula:
        if formula[part]["tensors"] or seen[part]["tensors"]:
            cells = [f"{side[part]['tensors']:,.0f}" for side in (formula, seen)]
            cells += [of_bytes(side[part][key]) for key in ("bytes", "wire_bytes") for side in (formula, seen)]
            rows.append([part, *cells])
    columns = ("class", "tensors", "compiled", "whole bytes", "compiled", "bytes sent", "compiled")
    return [_table("Traffic: formula, and counted in the compiled program", columns, rows, 1)]


def _advice(report: dict[str, Any]) -> list[str]:
    found = []
    if report.get("improvements"):
        rows = [[shlex.join(item["change"]), f"{item['speedup'] - 1:+.0%}"] for item in report["improvements"]]
        found.append(_table("What would help most", ("options", "tokens/s"), rows, 1))
    if report.get("search"):
        rows = [
            [
                shlex.join(item["change"]),
                of_seconds(item["step_seconds"]),
                f"{item['mfu']:.1%}",
                of_bytes(item["peak_bytes"]),
            ]
            for item in report["search"]
        ]
        found.append(_table("Layouts that fit, quickest first", ("options", "step", "MFU", "memory"), rows, 1))
    return found


def _tensors(report: dict[str, Any]) -> str:
    rows = []
    for row in report["tensors"]:
        layouts = (" . ".join("+".join(a) or "-" for a in row[key]) for key in ("storage_spec", "compute_spec"))
        sizes = (of_bytes(row[key]) for key in ("main_bytes", "optimizer_bytes", "compute_bytes"))
        rows.append([row["name"], "x".join(map(str, row["shape"])), *layouts, row["note"], *sizes])
    columns = ("tensor", "shape", "storage", "compute", "note", "main", "optimizer", "compute")
    return _table("Tensors, bytes per device", columns, rows, 5)
