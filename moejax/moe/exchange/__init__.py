"""How rows reach experts: one file per exchange, one interface."""

from moejax.config import Config
from moejax.kernels.mxfp8 import BLOCK
from moejax.moe.admission import Capacity
from moejax.moe.exchange.gather import Gather
from moejax.moe.exchange.interface import Exchange, Plan
from moejax.moe.exchange.local import Local
from moejax.moe.exchange.padded import Padded
from moejax.moe.exchange.ragged import Ragged

__all__ = ["Exchange", "Gather", "Local", "Padded", "Plan", "Ragged", "make_exchange", "row_bytes"]


def make_exchange(config: Config) -> Exchange:
    """The exchange that `moe.exchange` names; by default `local` without expert parallelism, else `padded`."""
    moe, experts, ranks = config.moe, config.model.moe.num_experts, config.expert_ranks
    by_weight = moe.capacity is not None and moe.drop_order == "weight"
    capacity = Capacity(moe.capacity, moe.capacity_per == "expert", by_weight)
    wire = "mxfp8" if moe.wire == "mxfp8" else None
    match moe.exchange or ("local" if ranks == 1 else "padded"):
        case "local":
            return Local(experts, capacity)
        case "gather":
            return Gather(experts, ranks, moe.expert_axes, capacity)
        case "ragged":
            return Ragged(experts, ranks, moe.expert_axes, capacity, moe.deduplicate, wire)
        case _:
            return Padded(experts, ranks, moe.expert_axes, capacity, moe.deduplicate, wire)


def row_bytes(config: Config) -> tuple[int, int]:
    """Bytes of a row as it is dispatched (`moe.wire`), and as results and gradients cross."""
    width = config.model.moe.latent_dim or config.model.d_model
    back = width * (4 if config.model.dtype == "float32" else 2)
    return width + width // BLOCK if config.moe.wire == "mxfp8" else back, back
