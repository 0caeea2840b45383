"""Sampling text from a model: the whole window is computed for each token, so nothing but the model is needed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.model.decoder import Decoder, Params


def _keep(logits_V: jax.Array, top_p: jax.Array) -> jax.Array:
    """Logits of the smallest set of tokens whose probabilities sum to `top_p`; the rest at minus infinity."""
    order = jnp.argsort(-logits_V)
    probs = jax.nn.softmax(logits_V)[order]
    cut = jnp.cumsum(probs) - probs >= top_p  # the first token always stays
    return jnp.where(jnp.zeros_like(cut).at[order].set(cut), -jnp.inf, logits_V)


def make_sampler(decoder: Decoder, vocab_size: int) -> Callable[..., jax.Array]:
    """Compiled function from a window of tokens to the next token.

    Args:
        decoder: A decoder whose exchange is `local`.
        vocab_size: Tokens of the tokenizer; padding rows of the embedding are never sampled.

    Returns:
        `sample(weights, window, length, key, temperature, top_p)`: window [S] int32, of which the first
        `length` are text. Temperature 0 takes the likeliest token.
    """

    def sample(
        weights: Params, window: jax.Array, length: Any, key: jax.Array, temperature: Any, top_p: Any
    ) -> jax.Array:
        place = jnp.arange(window.size, dtype=jnp.int32)
        segments = jnp.where(place < length, 1, 0).astype(jnp.int32)
        batch = {"tokens": window[None], "segments": segments[None], "positions": place[None]}
        x_BSD, _ = decoder.layers(weights, batch, lambda name, stored: stored)
        x_BSD = decoder.norm(weights, x_BSD)
        head_DV = decoder.bind_ends(weights).head_DV
        logits_V = jnp.dot(x_BSD[0, length - 1], head_DV, preferred_element_type=jnp.float32)[:vocab_size]
        drawn = jax.random.categorical(key, _keep(logits_V / jnp.maximum(temperature, 1e-6), top_p))
        return jnp.where(temperature > 0, drawn, jnp.argmax(logits_V)).astype(jnp.int32)

    return jax.jit(sample)


def generate(
    sample: Callable[..., jax.Array],
    weights: Params,
    prompt: list[int],
    *,
    max_tokens: int,
    window: int,
    stop: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> list[int]:
    """Continue `prompt` (token ids, not empty) by up to `max_tokens` tokens, or until the token `stop`.

    The model sees the last `window` tokens.
    """
    tokens = list(prompt)
    key = jax.random.key(seed)
    for i in range(max_tokens):
        seen = tokens[-window:]
        padded = np.zeros(window, np.int32)
        padded[: len(seen)] = seen
        args = (np.int32(len(seen)), jax.random.fold_in(key, i), np.float32(temperature), np.float32(top_p))
        token = int(sample(weights, padded, *args))
        if token == stop:
            break
        tokens.append(token)
    return tokens[len(prompt) :]
