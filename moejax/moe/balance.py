"""Auxiliary losses of the router, as sums over tokens that are divided by the tokens of a whole step.

The load-balancing loss is L = N * sum_i f_i P_i with f_i = C_i / (K T) from requested counts, without gradient,
and P_i the mean over tokens of scores that sum to one (report section 10.5, equation 30); balanced is 1. Its
scope is the set of tokens whose counts C_i make f. The tokens of the soft part are always each token's own, so
that the loss times T is N * sum_i f_i Q_i with Q_i the sum of scores, and adds up over devices and microbatches.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.axes import CONTEXT, TOKEN_AXES
from moejax.moe.router import Route

Scope = Literal["sequence", "sequence_unbiased", "local", "synchronized", "accumulated", "global_batch"]


def count_experts(expert: jax.Array, num_experts: int) -> jax.Array:
    """Routes of each expert, int32 [E]; those of `num_experts` (no expert) are left out."""
    return jnp.bincount(expert.reshape(-1), length=num_experts + 1)[:num_experts].astype(jnp.int32)


def sequence_sum(route: Route, valid_BS: jax.Array, unbiased: bool = False, sharded: bool = False) -> jax.Array:
    """Balance loss of each sequence by itself, times its tokens, summed.

    Each sequence has its own histogram, so neither the mesh nor the number of microbatches changes the value.

    Args:
        route: The routing decision.
        valid_BS: Tokens that exist.
        unbiased: Count the experts of the K highest scores, whatever bias and groups made of them: the
            sequence-wise loss of DeepSeek-V3 (equations 17 to 20).
        sharded: The sequences are sharded over the context axis: their histograms are summed over it, B x N integers.
    """
    num_experts, top_k = route.score_TE.shape[1], route.expert_TK.shape[1]
    expert_TK = route.expert_TK
    if unbiased:
        best_TK = lax.top_k(lax.stop_gradient(route.score_TE), top_k)[1]
        expert_TK = jnp.where(valid_BS.reshape(-1, 1), best_TK, num_experts)
    counts_BE = jax.vmap(lambda e: count_experts(e, num_experts))(expert_TK.reshape(valid_BS.shape[0], -1))
    if sharded:
        counts_BE = checkpoint_name(lax.psum(counts_BE, CONTEXT), "plan")
    score_BSE = jnp.where(valid_BS[:, :, None], route.score_TE.reshape(*valid_BS.shape, num_experts), 0.0)
    return jnp.sum(weighted_scores(counts_BE, jnp.sum(score_BSE, axis=1)))


def weighted_scores(counts_XE: jax.Array, score_XE: jax.Array) -> jax.Array:
    """N * sum_i f_i Q_i for each histogram; f = C / sum C, because each token of the scope counts K times."""
    total = jnp.maximum(jnp.sum(counts_XE, axis=-1, keepdims=True), 1)
    fraction = lax.stop_gradient(counts_XE.astype(jnp.float32) / total.astype(jnp.float32))
    return counts_XE.shape[-1] * jnp.sum(fraction * score_XE, axis=-1)


def balance_sum(
    scope: Scope, score_LE: jax.Array, own_LE: jax.Array, before_LE: jax.Array | None, step_LE: jax.Array | None
) -> jax.Array:
    """Balance loss times tokens [L] of this device's microbatch, for scopes wider than a sequence.

    `local` reads no other device. `synchronized` sums the counts of the current microbatch over devices, and
    `accumulated` those of all microbatches so far: N integers a layer and microbatch (equations 31 and 32). For
    `global_batch` the counts of the whole step must be known before the first backward pass (33 and 34).

    Args:
        scope: One of `Scope` but the sequence ones.
        score_LE: Q of this device and microbatch; the gradient goes through it.
        own_LE: Requested counts of this device and microbatch.
        before_LE: Those of this device in earlier microbatches, for `accumulated`.
        step_LE: Those of all devices and microbatches, for `global_batch`; None if there is one microbatch.
    """
    if scope == "accumulated" and before_LE is not None:
        own_LE = own_LE + before_LE
    if step_LE is not None:
        return weighted_scores(step_LE, score_LE)
    return weighted_scores(own_LE if scope == "local" else lax.psum(own_LE, TOKEN_AXES), score_LE)


def z_loss_sum(route: Route, valid_T: jax.Array) -> jax.Array:
    """Router z-loss: sum over valid tokens of logsumexp(logits)^2 (Zoph et al., 2022)."""
    return jnp.sum(jnp.where(valid_T, jnp.square(route.logsumexp_T), 0.0))


def moved_bias(bias_LE: jax.Array, requested_LE: jax.Array, rate: jax.Array | float) -> jax.Array:
    """Selection bias after a step: up by `rate` where load is under the mean, down where it is over.

    The sign step (report, equation 37) is centred, so that the mean of the bias stays where it is.

    Args:
        bias_LE: Bias of each layer.
        requested_LE: Requested routes of the whole step, of all devices and microbatches.
        rate: Size of a step.
    """
    requested = requested_LE.astype(jnp.float32)
    sign = jnp.sign(jnp.mean(requested, axis=-1, keepdims=True) - requested)
    return bias_LE + rate * (sign - jnp.mean(sign, axis=-1, keepdims=True))
