"""How often layers run in a step on one device: microbatch after microbatch, or tick after tick of a pipeline."""

from collections.abc import Iterator
from dataclasses import dataclass

from moejax.config import Config, LayerSpec
from moejax.schedule.table import Table, make_table
from moejax.stages import plan_stages


@dataclass(frozen=True)
class Run:
    """One layer of a pattern.

    Attributes:
        spec: What it is.
        policy: What its backward pass computes again.
        last: Whether it is the last of its pattern, so that recomputation need not know its result.
        forward: How often its forward pass runs, in bubbles and empty slots too: collectives run there as well.
        backward: How often its backward pass runs.
        share: Parts that the sequences of a microbatch are cut into; each run has one of them.
        taken: Part of the runs that a step takes; the others stand in a branch that it leaves out.
        merged: Whether forward and backward pass stand in one body, as in a loop of one turn, which XLA unrolls: then
            it repeats no plan of an exchange.
        alone: Whether that is a group of one repetition: then it repeats few sums too.
        mixer_ahead: How often its mixer and its router run in the forward pass that counts routes ahead.
        ffn_ahead: How often its FFN does.
    """

    spec: LayerSpec
    policy: str
    last: bool
    forward: int
    backward: int
    share: int = 1
    taken: float = 1.0
    merged: bool = False
    alone: bool = False
    mixer_ahead: int = 0
    ffn_ahead: int = 0

    @property
    def mixer(self) -> int:
        """How often its mixer runs forward."""
        return self.forward + self.mixer_ahead

    @property
    def ffn(self) -> int:
        """How often its FFN runs forward."""
        return self.forward + self.ffn_ahead


def table_of(config: Config) -> Table | None:
    """The schedule of a pipeline; None without stages."""
    if config.mesh.stage == 1:
        return None
    pipeline = config.pipeline
    return make_table(config.mesh.stage, config.train.microbatches, pipeline.virtual_stages, pipeline.schedule)


def ticks(config: Config) -> tuple[int, int]:
    """How often a chunk, or without a pipeline the whole model, runs forward and backward."""
    table = table_of(config)
    if table is None:
        return config.train.microbatches, config.train.microbatches
    forward, backward = (int(table.columns[f"{half}_valid"].any(axis=1).sum()) for half in ("forward", "backward"))
    return forward, backward


def runs(config: Config) -> Iterator[Run]:
    """Every layer of every pattern, and that of the modules of multi-token prediction.

    In a pipeline the latter belong to the head: in the branch of each tick in which a microbatch may leave the last
    stage, and on each stage for a part of its sequences.
    """
    forward, backward = ticks(config)
    for index, group in enumerate(config.model.layers):
        slots = plan_stages(config).per_chunk[index] if config.mesh.stage > 1 else group.repeat
        alone = config.mesh.stage == 1 and slots == 1
        for place, spec in enumerate(group.pattern):
            last = place == len(group.pattern) - 1
            ahead = [forward * slots * runs for runs in runs_ahead(config, index, place)]
            yield Run(
                spec, config.remat.of(index), last, forward * slots, backward * slots, 1, 1.0, alone, alone, *ahead
            )
    if modules := config.model.mtp:  # a norm comes after the layer, so it is not the last of what is recomputed
        policy, stages = config.remat.of(len(config.model.layers) - 1), config.mesh.stage
        turns, taken = modules * forward, config.train.microbatches / forward
        merged = stages > 1 or modules == 1
        ahead = [turns * runs for runs in runs_ahead(config, len(config.model.layers), 0)]
        yield Run(config.model.specs[-1], policy, False, turns, turns, stages, taken, merged, False, *ahead)


def counts_ahead(config: Config) -> bool:
    """Whether one more forward pass counts the routes of the whole step before the first backward pass."""
    return config.loss.balance_scope == "global_batch" and config.train.microbatches > 1


def runs_ahead(config: Config, group: int, place: int) -> tuple[bool, bool]:
    """Whether the forward pass that counts routes ahead runs a layer's mixer, and whether it runs its FFN.

    Nothing reads what comes after the last router, so XLA leaves it out; but a loop it leaves out as a whole, or not.

    Args:
        config: The run.
        group: Index of the layer's group; multi-token prediction is the last one.
        place: Index in the group's pattern.
    """
    model = config.model
    patterns = [spec.pattern for spec in model.layers] + ([model.specs[-1:]] if model.mtp else [])
    repeats = [spec.repeat for spec in model.layers] + [model.mtp]
    routers = [(i, j) for i, pattern in enumerate(patterns) for j, spec in enumerate(pattern) if spec.ffn == "moe"]
    if not counts_ahead(config) or not routers or group > routers[-1][0]:
        return False, False
    ticks_around = config.mesh.stage > 1 and group < len(model.layers)
    if group < routers[-1][0] or repeats[group] > 1 or ticks_around:
        return True, True
    return place <= routers[-1][1], place < routers[-1][1]


def bubble(config: Config) -> float:
    """Share of the time of all stages in which they wait: (S - 1) / (v M + S - 1) where S divides M."""
    table = table_of(config)
    return 0.0 if table is None else table.idle_share()
