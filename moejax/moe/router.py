"""The router: which experts a token goes to, and with what weight. Float32 throughout."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.axes import TOKEN_AXES
from moejax.config import MoEModelConfig
from moejax.varying import varying_axes

TINY = 1e-20
"""Keeps the sum of the chosen scores from zero, when all sigmoids underflow."""


class RouterWeights(NamedTuple):
    """What the router reads, float32.

    Attributes:
        router: Weights [D, E].
        bias: Added to the logits [E], or None.
        scale: Multiplies the input [D], or None.
        selection: Added to the scores for the choice alone [E], without gradient, or None.
    """

    router: jax.Array
    bias: jax.Array | None = None
    scale: jax.Array | None = None
    selection: jax.Array | None = None


class Route(NamedTuple):
    """A routing decision, float32 and int32.

    Attributes:
        expert_TK: Chosen experts, best first; `num_experts` (no expert) for tokens that are not valid.
        weight_TK: Weight of each choice in the output; zero for tokens that are not valid.
        score_TE: Scores over all experts, summing to one for each token: the soft part of the balance loss.
        logsumexp_T: Log of the sum of the exponentials of the logits, for the z-loss.
        margin_T: What is ranked, of the last chosen over the first one not chosen.
    """

    expert_TK: jax.Array
    weight_TK: jax.Array
    score_TE: jax.Array
    logsumexp_T: jax.Array
    margin_T: jax.Array


def route(
    x_TD: jax.Array,
    valid_T: jax.Array,
    weights: RouterWeights,
    config: MoEModelConfig,
    forced: str = "learned",
    jitter: float = 0.0,
) -> Route:
    """Choose K experts for each token. Ties go to the lower expert; padding is never routed.

    Args:
        x_TD: Hidden states.
        valid_T: Tokens that exist.
        weights: Router weights.
        config: Scores, choice and merge rule.
        forced: `learned`, or for benchmarks `uniform` (all experts in turn) or `random` (drawn, the same each step).
        jitter: Half width of the noise around one that multiplies the hidden states; see `noise`.
    """
    x_TD = x_TD.astype(jnp.float32)
    if jitter:
        x_TD = x_TD * (1.0 + jitter * noise(x_TD))
    logits_TE = _logits(x_TD, valid_T, weights)
    logsumexp_T = jax.nn.logsumexp(logits_TE, axis=-1)
    score_TE, normal_TE = _scores(logits_TE, logsumexp_T, config.scores)
    ranked_TE = lax.stop_gradient(logits_TE if config.softmax == "after" else score_TE)
    if weights.selection is not None:
        ranked_TE = ranked_TE + lax.stop_gradient(weights.selection)
    if forced != "learned":
        ranked_TE = _forced(ranked_TE, config.top_k, forced)
    expert_TK, margin_T = _choose(ranked_TE, config)
    expert_TK = checkpoint_name(expert_TK, "route")  # recomputation must not break a tie another way
    weight_TK = _weights(logits_TE, score_TE, expert_TK, config)
    weight_TK = jnp.where(valid_T[:, None], weight_TK, 0.0)
    expert_TK = jnp.where(valid_T[:, None], expert_TK, config.num_experts).astype(jnp.int32)
    return Route(expert_TK, weight_TK, normal_TE, logsumexp_T, jnp.where(valid_T, margin_T, 0.0))


def _logits(x_TD: jax.Array, valid_T: jax.Array, weights: RouterWeights) -> jax.Array:
    if weights.scale is not None:
        x_TD = x_TD * weights.scale
    logits_TE = jnp.dot(x_TD, weights.router.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    if weights.bias is not None:
        logits_TE = logits_TE + weights.bias
    return jnp.where(valid_T[:, None], logits_TE, 0.0)


def noise(x_TD: jax.Array) -> jax.Array:
    """Numbers uniform in [-1, 1), a hash of all bits of a token's hidden state: no random key has to reach the layers.

    They differ between tokens and layers, and change with every update of the weights. A run repeats them exactly;
    another mesh rounds hidden states in another way, and so has other noise.
    """
    bits_TD = lax.bitcast_convert_type(lax.stop_gradient(x_TD), jnp.uint32)
    place_D = jnp.arange(x_TD.shape[1], dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    token_T = jnp.sum(_mixed(bits_TD + place_D), axis=1, dtype=jnp.uint32)
    return (_mixed(token_T[:, None] ^ _mixed(place_D)) >> 8).astype(jnp.float32) * 2.0**-23 - 1.0


def _mixed(bits: jax.Array) -> jax.Array:
    """A bijection of 32 bits whose every input bit flips each output bit half of the time (MurmurHash3's last step)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def _scores(logits_TE: jax.Array, logsumexp_T: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """Scores, and the same divided by their sum over experts."""
    if kind == "softmax":
        score_TE = jnp.exp(logits_TE - logsumexp_T[:, None])
        return score_TE, score_TE
    score_TE = jax.nn.sigmoid(logits_TE) if kind == "sigmoid" else jnp.sqrt(jax.nn.softplus(logits_TE))
    return score_TE, score_TE / (jnp.sum(score_TE, axis=-1, keepdims=True) + TINY)


def _choose(ranked_TE: jax.Array, config: MoEModelConfig) -> tuple[jax.Array, jax.Array]:
    """The K best and their lead over the next one.

    From the best groups only if groups are limited (DeepSeek-V3: a group counts its two best).
    """
    tokens, num_experts = ranked_TE.shape
    if config.num_groups > 1:
        grouped = ranked_TE.reshape(tokens, config.num_groups, -1)
        group_score = jnp.sum(lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
        _, best = lax.top_k(group_score, config.top_groups)
        open_TG = jnp.any(best[:, :, None] == jnp.arange(config.num_groups), axis=1)
        ranked_TE = jnp.where(open_TG[:, :, None], grouped, -jnp.inf).reshape(tokens, num_experts)
    # Only the choice is read of it: XLA:CPU sorts whole rows for a top-k whose parts are cut further.
    expert_TK = lax.top_k(ranked_TE, config.top_k)[1].astype(jnp.int32)
    chosen_TE = jnp.any(expert_TK[:, :, None] == jnp.arange(num_experts), axis=1)
    last_T = jnp.min(jnp.where(chosen_TE, ranked_TE, jnp.inf), axis=-1)
    next_T = jnp.max(jnp.where(chosen_TE, -jnp.inf, ranked_TE), axis=-1)
    margin_T = last_T - next_T
    return expert_TK, jnp.where(jnp.isfinite(margin_T), margin_T, 0.0)  # not finite where nothing else was open


def _weights(logits_TE: jax.Array, score_TE: jax.Array, expert_TK: jax.Array, config: MoEModelConfig) -> jax.Array:
    """Merge weights of the chosen experts; never of the selection bias (report, appendix E)."""
    if config.softmax == "after":
        weight_TK = jax.nn.softmax(_pick(logits_TE, expert_TK), axis=-1)
    else:
        weight_TK = _pick(score_TE, expert_TK)
        if config.merge != "raw":
            weight_TK = weight_TK / (jnp.sum(weight_TK, axis=-1, keepdims=True) + TINY)
    scale = config.routed_scale * (config.top_k if config.merge == "sum_to_k" else 1)
    return weight_TK * scale if scale != 1 else weight_TK


def _pick(score_TE: jax.Array, expert_TK: jax.Array) -> jax.Array:
    """Scores of the chosen experts, by masks: the gradient is a masked sum, and no scatter-add."""
    chosen_TKE = expert_TK[:, :, None] == jnp.arange(score_TE.shape[1])
    return jnp.sum(jnp.where(chosen_TKE, score_TE[:, None, :], 0.0), axis=-1)


def _forced(ranked_TE: jax.Array, top_k: int, forced: str) -> jax.Array:
    """Scores that make the choice what a benchmark wants; weights stay those of the router."""
    tokens, num_experts = ranked_TE.shape
    if forced == "uniform":
        token = jnp.arange(tokens)[:, None]
        return -((jnp.arange(num_experts)[None] - token * top_k) % num_experts).astype(jnp.float32)
    key = jax.random.key(0)
    for axis in sorted(varying_axes(ranked_TE) & set(TOKEN_AXES)):
        key = jax.random.fold_in(key, lax.axis_index(axis))
    return jax.random.uniform(key, ranked_TE.shape)
