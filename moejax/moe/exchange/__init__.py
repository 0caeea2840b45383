"""How rows reach experts: one file per exchange, one interface."""

from moejax.axes import EXPERT
from moejax.config import Config
from moejax.moe.exchange.interface import Exchange, Plan
from moejax.moe.exchange.local import Local
from moejax.moe.exchange.padded import Padded

__all__ = ["Exchange", "Local", "Padded", "Plan", "make_exchange"]


def make_exchange(config: Config) -> Exchange:
    """The exchange that `moe.exchange` names; by default `local` without expert parallelism, else `padded`."""
    experts, capacity, ranks = config.model.moe.num_experts, config.moe.capacity, config.mesh.expert
    if config.moe.exchange == "local" or (config.moe.exchange is None and ranks == 1):
        return Local(experts, capacity)
    return Padded(experts, ranks, EXPERT, capacity)
