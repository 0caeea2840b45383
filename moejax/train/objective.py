"""The loss of a step, from sums that add up over devices and microbatches."""

import jax
import jax.numpy as jnp

from moejax.config import Config
from moejax.model.decoder import Sums
from moejax.moe.balance import balance_sum


def losses(sums: Sums, num_tokens: jax.Array, config: Config) -> dict[str, jax.Array]:
    """Loss and its parts, each a sum over tokens divided by the valid tokens of the whole step.

    The balance loss and the z-loss are means over MoE layers as well, the loss of multi-token prediction is a mean over
    its modules (DeepSeek-V3, equations 24 and 25, T being the valid tokens). Applied to the sums of one device, one
    microbatch or some layers this is their additive share, so padding, microbatches and mesh change no gradient.
    """
    tokens = jnp.maximum(num_tokens, 1).astype(jnp.float32)
    parts = {"ce_loss": sums.ce / tokens, "balance_loss": jnp.zeros_like(sums.ce), "z_loss": jnp.zeros_like(sums.ce)}
    if sums.statistics is not None:
        scale = tokens * config.model.num_routers
        parts["balance_loss"] = jnp.sum(sums.statistics.balance_sum) / scale
        parts["z_loss"] = jnp.sum(sums.statistics.z_sum) / scale
    extra = config.loss.balance_weight * parts["balance_loss"] + config.loss.z_weight * parts["z_loss"]
    if sums.mtp is not None:
        parts["mtp_loss"] = sums.mtp / (tokens * config.model.mtp)
        extra += config.loss.mtp_weight * parts["mtp_loss"]
    return {"loss": parts["ce_loss"] + extra, **parts}


def with_balance(sums: Sums, earlier_LE: jax.Array | None, step_LE: jax.Array | None, config: Config) -> Sums:
    """`sums` with the balance loss of a scope that is wider than a sequence; layers make the others themselves.

    Args:
        sums: Of one microbatch, of all layers or some.
        earlier_LE: Requested routes of these layers in the microbatches before.
        step_LE: Their requested routes in the whole step, on all devices.
        config: The run.
    """
    now, scope = sums.statistics, config.loss.balance_scope
    if now is None or scope in ("sequence", "sequence_unbiased"):
        return sums
    balance_L = balance_sum(scope, now.score_E, now.requested_E, earlier_LE, step_LE)
    return sums._replace(statistics=now._replace(balance_sum=balance_L))
