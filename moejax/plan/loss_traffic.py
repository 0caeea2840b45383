"""What the loss, the norm of the gradient, and the statistics of a step move: small sums over all devices."""

from collections.abc import Iterator

from moejax.axes import AXES, STAGE, TOKEN_AXES
from moejax.config import Config
from moejax.plan.exchange import Found, exchange_of
from moejax.plan.moves import LOSS


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
    if config.log.pairs:
        yield move(TOKEN_AXES, "s32", routers * config.expert_ranks**2)
    if config.mesh.stage > 1:
        for group in model.layers:
            if layers := group.repeat * sum(spec.ffn == "moe" for spec in group.pattern):
                for dtype, numbers in statistics(config):
                    yield move((STAGE,), dtype, layers * numbers)


def statistics(config: Config) -> list[tuple[str, int]]:
    """Type and numbers of each array that a router reports and something reads; see `moe.statistics.Statistics`."""
    experts = config.model.moe.num_experts
    return [("f32", 1)] * 5 + [("s32", experts)] * 2 + [("s32", 1)] * 4
