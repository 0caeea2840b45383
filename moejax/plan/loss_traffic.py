"""What the loss, the norm of the gradient, and the statistics of a step move: small sums over all devices."""

from collections.abc import Iterator

from moejax.axes import AXES, STAGE, TOKEN_AXES
from moejax.config import Config
from moejax.plan.exchange import Found, exchange_of
from moejax.plan.moves import LOSS
from moejax.plan.turns import counts_ahead, ticks
from moejax.stages import plan_stages


def of_loss(config: Config) -> Iterator[Found]:
    """Sums of a step that are no gradients: cross-entropies, tokens, the norm's squares, statistics of routers."""

    def move(axes: tuple[str, ...], dtype: str, numbers: int, times: int = 1) -> Found:
        return (LOSS, "all-reduce", dtype, axes), times, 4 * numbers, None

    model, turns = config.model, config.train.microbatches
    yield move(TOKEN_AXES, "f32", 1, 2 if model.mtp else 1)
    yield move(TOKEN_AXES, "s32", 1)
    yield move(AXES, "f32", 1)
    routers = model.num_routers
    if not routers:
        return
    for dtype, numbers in statistics(config):
        yield move(TOKEN_AXES, dtype, routers * numbers)
    if exchange_of(config) == "local" and turns == 1 and config.mesh.stage == 1:
        yield move(TOKEN_AXES, "s32", routers, -1)  # rows sent and rows saved are both zero: XLA sums them once
    yield from _of_balance(config)
    if config.log.pairs:
        yield move(TOKEN_AXES, "s32", routers * config.expert_ranks**2)
    if config.mesh.stage > 1:
        for group in model.layers:
            if layers := group.repeat * sum(spec.ffn == "moe" for spec in group.pattern):
                for dtype, numbers in statistics(config):
                    yield move((STAGE,), dtype, layers * numbers)


def _of_balance(config: Config) -> Iterator[Found]:
    """Sums of counted routes for a balance loss whose scope is wider than a device's microbatch.

    With one microbatch they are those of the statistics, and XLA sums them once. A pipeline sums them layer by layer
    and tick by tick, those of the modules of multi-token prediction in the branch of the head; or ahead, of all slots
    of a stage at once.
    """
    key, routes = (LOSS, "all-reduce", "s32", TOKEN_AXES), 4 * config.model.moe.num_experts
    model, turns, ahead = config.model, config.train.microbatches, counts_ahead(config)
    if not ahead and config.loss.balance_scope not in ("synchronized", "accumulated"):
        return
    if config.mesh.stage == 1:
        if turns > 1:
            yield key, 1 if ahead else turns, routes * model.num_routers, None
        return
    forward, _ = ticks(config)
    for group, slots in zip(model.layers, plan_stages(config).per_chunk, strict=True):
        routers = sum(spec.ffn == "moe" for spec in group.pattern)
        if ahead and routers:
            yield key, 1, routes * routers * slots * config.pipeline.virtual_stages, None
        elif routers:
            yield key, forward * slots, routes * routers, None
    if model.mtp and model.specs[-1].ffn == "moe":
        size = routes * model.mtp
        yield key, 1 if ahead else forward, size, None if ahead else round(size * turns / forward)
    if ahead:  # a number that orders this pass before the next
        yield (LOSS, "all-reduce", "s32", (STAGE,)), 1, 4, None


def statistics(config: Config, summed: bool = True) -> list[tuple[str, int]]:
    """Type and numbers of each array that a router reports and something reads; see `moe.statistics.Statistics`.

    Args:
        config: The run.
        summed: Whether the balance loss is there already; without it, scopes wider than a sequence need all scores.
    """
    experts = config.model.moe.num_experts
    scores = 1 if summed or config.loss.balance_scope in ("sequence", "sequence_unbiased") else experts
    return [("f32", 1)] * 4 + [("f32", scores)] + [("s32", experts)] * 2 + [("s32", 1)] * 4
