"""The plan of a run as one JSON object."""

import dataclasses
from dataclasses import asdict
from typing import Any

from moejax.axes import AXES
from moejax.config import Config
from moejax.errors import UserError
from moejax.plan.compile import Compiled
from moejax.plan.cost import group_of, move_seconds, step_cost, unevenness
from moejax.plan.flops import tokens_per_step, training_flops
from moejax.plan.memory import bytes_per_parameter, memory
from moejax.plan.moves import Move, by_class, compiled_traffic
from moejax.plan.parameters import module_counts, mtp_parameters
from moejax.plan.search import Candidate, evaluate, improvements, largest_microbatch
from moejax.plan.target import Target
from moejax.plan.tensors import Tensor, tensors
from moejax.plan.traffic import stacked_sums, step_traffic
from moejax.plan.turns import bubble, table_of
from moejax.stages import plan_stages


def make_report(config: Config, target: Target | None = None, compiled: Compiled | None = None) -> dict[str, Any]:
    """Everything that is known of a run before it runs.

    Args:
        config: The run.
        target: Machine to estimate times and fit for; None to leave them out.
        compiled: The step, compiled for the target; None to leave it out.

    Raises:
        UserError: The sharding rules do not fit the model and the mesh.
    """
    found = tensors(config)
    flops = training_flops(config, found)
    moves = step_traffic(config, found, target)
    report: dict[str, Any] = {
        "run": config.run.name,
        "parameters": module_counts(config).as_dict() | _experts(config),
        "mesh": mesh_of(config),
        "devices": config.mesh.size,
        "gather": config.weights.gather,
        "flops": {
            "per_token": sum(flops.values()),
            "by_part": flops,
            "tokens_per_step": tokens_per_step(config),
            "per_step": sum(flops.values()) * tokens_per_step(config),
        },
        "memory": memory(config, found, target.platform if target else None),
        "bytes_per_parameter": _state(config, found),
        "traffic": [_move(move, config, target) for move in moves],
        "tensors": [tensor.as_dict() for tensor in found],
    }
    if config.mesh.stage > 1:
        report["stages"] = _stages(config)
    if target is not None:
        report |= _on_target(config, found, target)
    if compiled is not None:
        report["compiled"] = _compiled(config, found, moves, compiled, sum(report["memory"].values()))
    return report


def mesh_of(config: Config) -> dict[str, int]:
    """Sizes of the mesh axes, outermost first."""
    return dict(zip(AXES, config.mesh.shape, strict=True))


def with_devices(config: Config, devices: int) -> Config:
    """The same run on another number of devices: more or fewer data-parallel replicas, the same work for each.

    Raises:
        UserError: The other mesh axes do not divide the number of devices.
    """
    others = config.mesh.size // config.mesh.data
    if devices < 1 or devices % others:
        raise UserError(
            f"--chips={devices}: must be a positive multiple of {others}, the product of the other mesh axes"
        )
    data = devices // others
    batch = config.data.batch_size // config.mesh.data * data
    mesh = dataclasses.replace(config.mesh, data=data)
    return dataclasses.replace(config, mesh=mesh, data=dataclasses.replace(config.data, batch_size=batch))


def _stages(config: Config) -> dict[str, Any]:
    """Chunks of layers, first to last, and the share of time that stages wait."""
    placed, first, chunks = plan_stages(config), 0, []
    for index, (units, cost) in enumerate(zip(placed.chunks, placed.costs, strict=True)):
        layers = sum(len(config.model.layers[group].pattern) for group, _ in units)
        share = cost / sum(placed.costs)
        chunks.append({"stage": index % config.mesh.stage, "first": first, "layers": layers, "share": share})
        first += layers
    table = table_of(config)
    assert table is not None
    return {"chunks": chunks, "bubble": bubble(config), "unevenness": unevenness(config), "held": table.depth}


def _experts(config: Config) -> dict[str, Any]:
    moe = config.model.moe
    alpha_e = moe.top_k / moe.num_experts if config.model.num_moe_layers else None
    return {"alpha_E": alpha_e, "mtp": mtp_parameters(config)}


def _state(config: Config, found: list[Tensor]) -> dict[str, dict[str, float]]:
    """Bytes of state for each parameter in this layout, with float32 accumulators, beside the report's figure 9.

    Empty where weights are not whole on a device between microbatches, or in other parts than experts.
    """
    mesh = config.mesh
    if config.weights.gather != "step" or mesh.stage * mesh.model > 1 or config.model.dtype == "float32":
        return {}
    whole: dict[str, dict[str, float]] = {}
    for part, ranks in (("dense", 1), ("routed experts", config.expert_ranks)):
        mine = [tensor for tensor in found if (tensor.part == "routed experts") is (part == "routed experts")]
        if mine:
            size = sum(t.main_bytes + t.optimizer_bytes + t.compute_bytes + 4 * t.compute_size for t in mine)
            wanted = bytes_per_parameter(mesh.size, ranks)
            whole[part] = {"layout": size / sum(tensor.size for tensor in mine), "report": wanted}
    return whole


def _move(move: Move, config: Config, target: Target | None) -> dict[str, Any]:
    found = asdict(move) | {"axes": list(move.axes), "wire_bytes": move.wire_bytes}
    if target is not None:
        group = group_of(config, move.axes)
        sent = target.sent(move.kind, move.moved, group)
        links = ["inside a node" if link.devices else "between nodes" for link in target.links]
        found["link"] = " and ".join(link for link, size in zip(links, sent, strict=True) if size)
        found["seconds"] = move_seconds(move, config, target) / target.share(config.mesh.size)
    return found


def _on_target(config: Config, found: list[Tensor], target: Target) -> dict[str, Any]:
    cost, now = step_cost(config, found, target), evaluate(config, target)
    return {
        "target": target.name,
        "cost": {
            "model_seconds": cost.model,
            "tax_seconds": cost.taxes,
            "step_seconds": cost.step,
            "tokens_per_second": cost.tokens_per_second,
            "mfu": cost.mfu,
            "peak": cost.mfu_peak,
            "dominates": max(cost.taxes, key=lambda name: cost.taxes[name]),
        },
        "fit": {
            "fits": now.fits,
            "verdict": now.verdict(),
            "limit": now.limit,
            "largest_microbatch": largest_microbatch(config, target),
        },
        "improvements": [candidate_dict(item, now) for item in improvements(config, target)],
    }


def candidate_dict(item: Candidate, now: Candidate | None = None) -> dict[str, Any]:
    """A candidate for JSON, with its speed against another."""
    found = {
        "change": list(item.change),
        "step_seconds": item.cost.step,
        "tokens_per_second": item.cost.tokens_per_second,
        "mfu": item.cost.mfu,
        "peak_bytes": item.peak,
        "fits": item.fits,
    }
    if now is not None:
        found["speedup"] = item.cost.tokens_per_second / now.cost.tokens_per_second
    return found


def _compiled(
    config: Config, found: list[Tensor], moves: list[Move], compiled: Compiled, estimate: int
) -> dict[str, Any]:
    seen = compiled_traffic(compiled.collectives, mesh_of(config), stacked_sums(config, found))
    return {
        "seconds": compiled.seconds,
        "flops": compiled.flops,
        "memory": compiled.memory(),
        "memory_estimate": estimate,
        "memory_difference": _difference(estimate, compiled.peak),
        "traffic": [_move(move, config, None) for move in seen],
        "by_class": {"formula": by_class(moves), "compiled": by_class(seen)},
        "traffic_difference": traffic_difference(by_class(moves), by_class(seen)),
    }


def traffic_difference(formula: dict[str, dict[str, float]], seen: dict[str, dict[str, float]]) -> str:
    """One line: whether tensors and bytes of each class agree, or which do not and by how much."""
    other = [name for name in formula if any(formula[name][key] != seen[name][key] for key in ("tensors", "bytes"))]
    if not other:
        return "formula and compiled program agree on the tensors and bytes of every class of traffic"
    tensors, more = (sum(seen[name][key] - formula[name][key] for name in other) for key in ("tensors", "bytes"))
    if more == 0 and tensors <= 0:
        names = " and ".join(other)
        return f"formula and compiled program agree on all bytes; the compiler moves some tensors of {names} as one"
    found = []
    for name in other:
        tensors, more = (seen[name][key] - formula[name][key] for key in ("tensors", "bytes"))
        share = f" ({more / formula[name]['bytes']:+.2%})" if formula[name]["bytes"] else ""
        found.append(f"{name} {tensors:+,.0f} tensors, {more:+,.0f} bytes{share}")
    return f"traffic of the compiled program differs from the formula: {', '.join(found)}"


CLOSE = 0.15
"""Difference between the memory estimate and the compiler's peak that needs no warning."""


def _difference(estimate: int, peak: int) -> str:
    """One line that explains how the estimate differs from the compiler's figure; a warning if by much."""
    share = estimate / peak - 1
    if abs(share) < 0.02:
        return f"the estimate of memory is within {abs(share):.1%} of the compiler's peak"
    side, why = "above", "the compiler reuses memory of classes that are not needed at once"
    if share < 0:
        side, why = "below", "the compiler keeps copies, padding or more temporaries than one layer's"
    line = f"the estimate of memory is {abs(share):.1%} {side} the compiler's peak: {why}"
    if abs(share) <= CLOSE:
        return line
    return f"warning: {line}; rely on the compiler's figure, and allow for as much in estimates of similar layouts"
