"""Whether a run fits, what would help, and which layout is best: the same estimates for many configurations."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moejax.config import Config
from moejax.errors import UserError
from moejax.plan.cost import Cost, step_cost
from moejax.plan.memory import memory
from moejax.plan.target import Target
from moejax.plan.tensors import tensors
from moejax.plan.text import of_bytes

HEADROOM = 0.92
"""Part of the device memory that a step may take; the rest goes to the runtime, fragments and other programs."""


@dataclass(frozen=True)
class Candidate:
    """A configuration with its estimates.

    Attributes:
        change: What differs from where the search began, as overrides of the command line.
        config: The configuration.
        cost: Time of a step.
        memory: Bytes on a device by class.
        limit: Bytes that a step may take.
    """

    change: tuple[str, ...]
    config: Config
    cost: Cost
    memory: dict[str, int]
    limit: int

    @property
    def peak(self) -> int:
        """Bytes on a device."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether memory suffices."""
        return self.peak <= self.limit

    def verdict(self) -> str:
        """One line: that it fits, or which class of memory is largest and how much is missing."""
        if self.fits:
            return f"fits: {of_bytes(self.peak)} of {of_bytes(self.limit)} per device"
        name = max(self.memory, key=lambda key: self.memory[key])
        over = of_bytes(self.peak - self.limit)
        return (
            f"does not fit: {of_bytes(self.peak)} of {of_bytes(self.limit)} per device, {over} over; "
            f"the largest class is {name} with {of_bytes(self.memory[name])}"
        )


def evaluate(config: Config, target: Target, change: tuple[str, ...] = ()) -> Candidate:
    """Estimate one configuration."""
    found = tensors(config)
    limit = int(HEADROOM * target.memory * target.share(config.mesh.size))
    return Candidate(change, config, step_cost(config, found, target), memory(config, found, target.platform), limit)


def changed(config: Config, changes: dict[str, object]) -> Config | None:
    """The configuration with dotted options changed, all at once; None where the result is no valid one."""
    try:
        sections: dict[str, object] = {}
        for key, value in changes.items():
            section, name = key.split(".")
            part = sections.get(section, getattr(config, section))
            sections[section] = dataclasses.replace(part, **{name: value})  # type: ignore[type-var]
        return dataclasses.replace(config, **sections)  # type: ignore[arg-type]
    except UserError:
        return None


def improvements(config: Config, target: Target) -> list[Candidate]:
    """Single changes that fit and make a token cheaper, or a run fit that does not: the three best, best first."""
    now = evaluate(config, target)
    found = []
    for changes in _single_changes(config):
        other = changed(config, changes)
        if other is not None:
            found.append(evaluate(other, target, _as_overrides(changes)))
    least = now.cost.tokens_per_second if now.fits else 0.0
    better = [item for item in found if item.fits and item.cost.tokens_per_second > least]
    return sorted(better, key=lambda item: -item.cost.tokens_per_second)[:3]


def _single_changes(config: Config) -> Iterator[dict[str, object]]:
    mesh, moe, train = config.mesh, config.moe, config.train
    yield {"train.microbatches": 2 * train.microbatches, "data.batch_size": 2 * config.data.batch_size}
    if train.microbatches > 1:
        yield {"train.microbatches": train.microbatches // 2}
    if mesh.data % 2 == 0:
        yield {"mesh.data": mesh.data // 2, "mesh.expert": 2 * mesh.expert}
    if mesh.expert % 2 == 0:
        yield {"mesh.data": 2 * mesh.data, "mesh.expert": mesh.expert // 2}
    for gather in ("step", "microbatch", "layer"):
        same = train.microbatches == 1 and {gather, config.weights.gather} == {"step", "microbatch"}
        if gather != config.weights.gather and not same:
            yield {"weights.gather": gather}
    for policy in ("none", "save_exchange", "full"):
        if policy != config.remat.policy:
            yield {"remat.policy": policy}
    stored = config.sharding.storage
    if mesh.data > 1 and mesh.expert > 1 and "embed" not in stored:
        yield {"sharding.storage": {**stored, "embed": ("data",)}}
    if mesh.expert > 1 and "expert" not in stored.get("embed", ("expert",)):
        yield {"sharding.storage": {**stored, "embed": ("data", "context", "expert")}}
    if moe.capacity is None or moe.capacity > 1.25:
        yield {"moe.capacity": 1.25}
    if mesh.expert > 1:
        if not moe.deduplicate:
            yield {"moe.exchange": "padded", "moe.deduplicate": True}
        if moe.exchange != "gather":
            yield {"moe.exchange": "gather", "moe.deduplicate": False}


def search(config: Config, target: Target) -> list[Candidate]:
    """Layouts of the same global batch on the same number of devices that fit, quickest first.

    Varies the mesh (data and expert), when weights are gathered, what is recomputed, and microbatches; then puts 2, 4
    and 8 pipeline stages, context shards and tensor shards in the place of replicas of the best ones.
    """
    found = list(_candidates(config, target, _layouts(config)))
    best = sorted(found, key=lambda item: (not item.fits, item.cost.step if item.fits else item.peak))[:_SEEDS]
    more = {str(changes): changes for item in best for changes in _deeper(item.config)}
    found += _candidates(config, target, more.values())
    return sorted((item for item in found if item.fits), key=lambda item: item.cost.step)


_SEEDS = 3
"""Layouts that stages, context and tensor shards are tried on."""


def _candidates(config: Config, target: Target, layouts: Iterable[dict[str, object]]) -> Iterator[Candidate]:
    for changes in layouts:
        other = changed(config, changes)
        if other is not None:
            try:
                yield evaluate(other, target, _as_overrides(changes))
            except UserError:  # a mesh that the model's dims or layers do not divide over
                continue


def _layouts(config: Config) -> Iterator[dict[str, object]]:
    mesh, batch = config.mesh, config.data.batch_size
    devices = mesh.size // (mesh.stage * mesh.context * mesh.model)
    experts = config.model.moe.num_experts if config.model.num_moe_layers else 1
    for expert in (size for size in _powers(devices) if devices % size == 0 and experts % size == 0):
        for turns in (size for size in _powers(batch) if batch % (devices * size) == 0):
            for gather in ("step", "microbatch", "layer"):
                if (turns == 1 and gather == "microbatch") or (mesh.stage > 1 and gather != "step"):
                    continue
                for policy in ("none", "save_exchange", "full"):
                    changes: dict[str, object] = {"mesh.data": devices // expert, "mesh.expert": expert}
                    changes |= {"train.microbatches": turns, "weights.gather": gather, "remat.policy": policy}
                    yield changes | _without_peers(expert)


def _without_peers(expert: int) -> dict[str, object]:
    return {"moe.exchange": None, "moe.deduplicate": False} if expert == 1 else {}


def _deeper(config: Config) -> Iterator[dict[str, object]]:
    """A layout with fewer replicas, and more stages, context shards or tensor shards, of the same work."""
    mesh, turns = config.mesh, config.train.microbatches
    for axis in ("stage", "context", "model"):
        for size in (2, 4, 8):
            for shrunk in ("data", "expert"):
                if getattr(mesh, shrunk) % size or getattr(mesh, axis) > 1:
                    continue
                for policy in {config.remat.policy, "save_exchange"}:
                    expert = mesh.expert // size if shrunk == "expert" else mesh.expert
                    changes: dict[str, object] = {"mesh.data": mesh.data * mesh.expert // size // expert}
                    changes |= {"mesh.expert": expert}
                    changes |= {f"mesh.{axis}": size, "remat.policy": policy}
                    changes["train.microbatches"] = turns * size if axis == "stage" else turns
                    changes["weights.gather"] = "step" if axis == "stage" else config.weights.gather
                    yield changes | _without_peers(expert)


def largest_microbatch(config: Config, target: Target) -> int:
    """Sequences of the largest microbatch on one device that fits, as many microbatches as now; 0 if none does.

    In a pipeline, where each size is traced by itself, the largest power of two.
    """
    shards = config.mesh.data * config.mesh.expert * config.train.microbatches

    def sized(rows: int) -> Config | None:
        return changed(config, {"data.batch_size": rows * shards})

    def fits(rows: int) -> bool:
        other = sized(rows)
        return other is not None and evaluate(other, target).fits

    first = next(filter(sized, _powers(1 << 16)), None)  # stages share multi-token prediction by sequences
    if first is None or not fits(first):
        return 0
    best = first
    while best < 1 << 16 and fits(2 * best):
        best *= 2
    step = best // 2 if config.mesh.stage == 1 else 0
    while step >= first:
        best += step if fits(best + step) else 0
        step //= 2
    return best


def _powers(limit: int) -> Iterator[int]:
    size = 1
    while size <= limit:
        yield size
        size *= 2


def _as_overrides(changes: dict[str, object]) -> tuple[str, ...]:
    return tuple(f"--{key}={json.dumps(value).strip(chr(34)).replace(' ', '')}" for key, value in changes.items())
