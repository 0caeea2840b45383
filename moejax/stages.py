"""Which layers run on which pipeline stage. Standard library only.

Layers are cut into stages x virtual stages chunks of consecutive repetitions; chunk k runs on stage k % stages (loop
placement). All stages run one program, so a chunk has a number of *slots* for each group of layers, the same on every
stage; a slot without a layer is empty, and costs no matmul.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from moejax.config import Config, LayerSpec, ModelConfig
from moejax.errors import UserError


@dataclass(frozen=True)
class Stages:
    """Placement of layers.

    Attributes:
        chunks: Of each chunk, first to last, its units as (group, repetition).
        costs: Cost of each chunk, in the units of `layer_cost`.
        slots: Of each group: [stage][slot] to repetition, -1 for an empty slot; slots of chunk after chunk.
        per_chunk: Slots of one chunk, of each group.
    """

    chunks: tuple[tuple[tuple[int, int], ...], ...]
    costs: tuple[float, ...]
    slots: tuple[tuple[tuple[int, ...], ...], ...]
    per_chunk: tuple[int, ...]


def layer_cost(model: ModelConfig, spec: LayerSpec, length: int) -> float:
    """Multiply-adds of one token's forward pass in a layer: weights that it uses, and half a window of scores."""
    a, m = model.attention, model.moe
    cost = 2.0 * model.d_model * a.head_dim * (a.num_heads + a.num_kv_heads)
    cost += 2.0 * a.num_heads * a.head_dim * min(spec.window or length, length / 2)
    if spec.ffn == "dense":
        return cost + 3.0 * model.d_model * model.mlp_dim
    inner = m.latent_dim or model.d_model
    cost += model.d_model * m.num_experts + 2.0 * model.d_model * m.latent_dim
    return cost + 3.0 * (m.top_k * m.expert_dim * inner + (m.shared_dim + m.dense_dim) * model.d_model)


@cache
def _best_cuts(costs: tuple[float, ...], chunks: int) -> tuple[int, ...]:
    """Ends of consecutive chunks whose largest cost is least, and among those the most even."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    count = len(costs)

    def solve(score: str, bound: float) -> tuple[float, tuple[int, ...]]:
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for chunk in range(chunks):
            found: dict[int, tuple[float, tuple[int, ...]]] = {}
            for stop in range(chunk + 1, count - (chunks - chunk - 1) + 1):
                for start, (before, ends) in best.items():
                    cost = sums[stop] - sums[start]
                    if start >= stop or cost > bound * (1 + 1e-9):
                        continue
                    value = max(before, cost) if score == "max" else before + cost * cost
                    if stop not in found or value < found[stop][0] * (1 - 1e-12):
                        found[stop] = (value, (*ends, stop))
            best = found
        return best[count]

    largest, _ = solve("max", float("inf"))
    return solve("squares", largest)[1]


def plan_stages(config: Config) -> Stages:
    """Place the layers of a model on `mesh.stage` stages, as `pipeline.layers` says or balanced by `layer_cost`.

    Raises:
        UserError: `pipeline.layers` cuts inside a repetition of a pattern, or there are fewer repetitions than chunks.
    """
    model, stages = config.model, config.mesh.stage
    units = [(g, r) for g, group in enumerate(model.layers) for r in range(group.repeat)]
    length = config.data.sequence_length
    costs = [sum(layer_cost(model, spec, length) for spec in model.layers[g].pattern) for g, _ in units]
    num_chunks = stages * config.pipeline.virtual_stages
    if len(units) < num_chunks:
        raise UserError(
            f"mesh.stage={stages}: {num_chunks} chunks need as many repetitions of a pattern, model.layers has "
            f"{len(units)}: use fewer stages, or shorter patterns that repeat more often"
        )
    ends = _given_cuts(config, units) if config.pipeline.layers else _best_cuts(tuple(costs), num_chunks)
    starts = (0, *ends[:-1])
    chunks = tuple(tuple(units[a:b]) for a, b in zip(starts, ends, strict=True))
    slots, per_chunk = [], []
    for g in range(len(model.layers)):
        mine = [[r for group, r in chunk if group == g] for chunk in chunks]
        width = max(len(found) for found in mine)
        padded = [found + [-1] * (width - len(found)) for found in mine]
        slots.append(tuple(tuple(r for chunk in padded[s::stages] for r in chunk) for s in range(stages)))
        per_chunk.append(width)
    total = tuple(sum(costs[a:b]) for a, b in zip(starts, ends, strict=True))
    return Stages(chunks, total, tuple(slots), tuple(per_chunk))


def _given_cuts(config: Config, units: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    lengths = [len(config.model.layers[g].pattern) for g, _ in units]
    ends, layers, unit = [], 0, 0
    for wanted in config.pipeline.layers:
        layers += wanted
        while sum(lengths[:unit]) < layers:
            unit += 1
        if sum(lengths[:unit]) != layers:
            raise UserError(
                f"pipeline.layers={list(config.pipeline.layers)}: layer {layers} is inside a repetition of a pattern; "
                f"cut before or after it"
            )
        ends.append(unit)
    return tuple(ends)
