"""The training step: gather weights, run the schedule, reduce gradients, update."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from moejax.axes import AXES, BATCH_AXES, CONTEXT, TOKEN_AXES
from moejax.config import Config
from moejax.model.decoder import Decoder, Params, Sums
from moejax.model.quantized import matrices, quantized
from moejax.moe.exchange import row_bytes
from moejax.moe.statistics import pair_matrix, summarize
from moejax.schedule.sequential import accumulate
from moejax.sharding import gather, gather_for, is_layout, reduce, sum_of_squares
from moejax.train.objective import losses, with_balance
from moejax.train.pipelined import Pipelined
from moejax.train.state import TrainState

BATCH_SPEC = PartitionSpec(BATCH_AXES, CONTEXT)
"""Sharding of the [B, S] arrays of a batch."""


def _gradients(
    decoder: Decoder, layouts: Params, forms: Params, config: Config, params: Params, batch: Params
) -> tuple[Params, Params]:
    """Inside `shard_map`: reduced gradients in storage layout, and metrics equal on every device."""
    mode, dtype = config.weights.gather, decoder.dtype
    groups = {key: layouts[key] for key in decoder.stacked}
    layer = jax.tree.map(lambda layout: layout.without_layers(), groups, is_leaf=is_layout)
    outside = {key: layouts[key] for key in layouts if not (mode == "layer" and key in groups)}

    def gather_layer(name: str, weights: Params) -> Params:
        return quantized(gather_for(layer[name], dtype)(weights), forms[name]) if mode == "layer" else weights

    def forward(weights: Params, microbatch: Params) -> Sums:
        if mode != "step":
            weights = jax.tree.map(lambda w: lax.optimization_barrier((w, microbatch["index"]))[0], weights)
            gathered = gather_for(outside, dtype)({key: weights[key] for key in outside})
            weights = weights | quantized(gathered, {key: forms[key] for key in outside})
        return decoder.sums(weights, microbatch, gather_layer)

    def loss_fn(weights: Params, microbatch: Params, before: Sums | None) -> tuple[jax.Array, Sums]:
        earlier = None if before is None or before.statistics is None else before.statistics.requested_E
        sums = with_balance(forward(weights, microbatch), earlier, step_LE, config)
        return losses(sums, num_tokens, config)["loss"], sums

    num_tokens = lax.psum(jnp.sum(batch["segments"] > 0, dtype=jnp.int32), TOKEN_AXES)
    microbatches = _microbatches(batch, config)
    # Storage does not change between microbatches: without a tie to something that does, XLA gathers it only once.
    microbatches["index"] = jnp.arange(config.train.microbatches, dtype=jnp.float32)
    weights = quantized(gather(params, layouts, dtype), forms) if mode == "step" else params
    if config.mesh.stage > 1:
        grads, sums = Pipelined(decoder, config, weights, microbatches, num_tokens).gradients()
    else:
        ahead = config.loss.balance_scope == "global_batch" and config.train.microbatches > 1
        step_LE = _requested_of_step(forward, weights, microbatches) if ahead else None
        grads, sums = accumulate(loss_fn, weights, microbatches)
    grads = reduce(grads, layouts) if mode == "step" else grads
    alone, sums = sums, lax.psum(sums, TOKEN_AXES)
    squares = lax.psum(sum_of_squares(grads, layouts, config.mesh), AXES)
    metrics = losses(sums, num_tokens, config) | {"grad_norm": jnp.sqrt(squares), "tokens": num_tokens}
    if alone.statistics is not None and sums.statistics is not None:
        bytes_both_ways, drops = sum(row_bytes(config)), config.moe.capacity is not None
        metrics |= summarize(sums.statistics, num_tokens, config.expert_ranks, bytes_both_ways, drops)
        if config.log.pairs:
            requested_LE = alone.statistics.requested_E
            metrics["moe/pairs"] = pair_matrix(requested_LE, config.expert_ranks, config.moe.expert_axes)
    return grads, metrics


def _microbatches(batch: Params, config: Config) -> Params:
    return jax.tree.map(lambda a: a.reshape(config.train.microbatches, -1, a.shape[-1]), batch)


def _requested_of_step(forward: Callable[[Params, Params], Sums], weights: Params, microbatches: Params) -> jax.Array:
    """Requested routes [L, E] of all devices and microbatches: a forward pass ahead of the first backward pass."""

    def one(microbatch: Params) -> jax.Array:
        statistics = forward(weights, microbatch).statistics
        assert statistics is not None
        return statistics.requested_E

    with jax.named_scope("prepass"):
        return lax.psum(jnp.sum(lax.map(one, microbatches), axis=0), TOKEN_AXES)


def gradient_function(decoder: Decoder, layouts: Params, config: Config, mesh: Mesh) -> Any:
    """(params, batch) to (gradients in storage layout, metrics): one `shard_map` over all mesh axes."""
    storage = jax.tree.map(lambda layout: layout.storage_spec, layouts, is_leaf=is_layout)
    forms = matrices(layouts, config.weights, config.mesh)

    def body(params: Params, batch: Params) -> tuple[Params, Params]:
        return _gradients(decoder, layouts, forms, config, params, batch)

    return jax.shard_map(
        body, mesh=mesh, in_specs=(storage, BATCH_SPEC), out_specs=(storage, PartitionSpec()), check_vma=True
    )


def evaluation_function(decoder: Decoder, layouts: Params, config: Config, mesh: Mesh) -> Any:
    """(params, batch) to sums over valid positions: cross-entropy in nats, and tokens.

    Parameters that the decoder does not have, those of multi-token prediction, are not read.
    """
    storage = jax.tree.map(lambda layout: layout.storage_spec, layouts, is_leaf=is_layout)
    forms = matrices(layouts, config.weights, config.mesh)

    def body(params: Params, batch: Params) -> Params:
        read = list(decoder.dims)
        gathered = gather({key: params[key] for key in read}, {key: layouts[key] for key in read}, decoder.dtype)
        weights = quantized(gathered, {key: forms[key] for key in read})
        tokens = jnp.sum(batch["segments"] > 0, dtype=jnp.int32)
        if config.mesh.stage > 1:
            ce = Pipelined(decoder, config, weights, _microbatches(batch, config), tokens).cross_entropy()
        else:
            ce = decoder.sums(weights, batch, lambda name, weights: weights).ce
        return lax.psum({"loss_sum": ce, "tokens": tokens}, TOKEN_AXES)

    return jax.shard_map(body, mesh=mesh, in_specs=(storage, BATCH_SPEC), out_specs=PartitionSpec(), check_vma=True)


def update(
    state: TrainState, grads: Params, metrics: Params, optimizer: optax.GradientTransformation, clip_norm: float | None
) -> tuple[TrainState, Params]:
    """Clip, and apply the optimizer to the storage shards. A step that is not finite changes its counters alone."""
    norm = metrics["grad_norm"]
    finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])
    if clip_norm is not None:
        scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
        grads = jax.tree.map(lambda g: g * scale, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    new = (optax.apply_updates(state.params, updates), opt_state)
    params, opt_state = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, (state.params, state.opt_state))
    bad = jnp.int32(1) - finite.astype(jnp.int32)
    state = TrainState(state.step + 1, params, opt_state, state.skipped + bad, (state.bad_streak + 1) * bad)
    return state, metrics | {"skipped_steps": state.skipped, "bad_streak": state.bad_streak}
