"""The update: clipping, skipped steps, optimizers on shards, and bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from moejax.config import OptimizerConfig, TrainConfig


@pytest.fixture(scope="module")
def prepared():
    """A program on 2 x 4 devices, its gradients of one batch, and the metrics."""
    run = tiny.config(2, 4)
    program = tiny.program(run)
    batch = program.put(tiny.batch(run))
    grads, metrics = jax.jit(program.gradients)(program.init(0).params, batch)
    return program, batch, jax.device_get(grads), jax.device_get(metrics)


def test_update_is_clipped_adamw(prepared):
    """One step equals AdamW written out in float64 on gradients scaled to the clip norm."""
    program, batch, grads, metrics = prepared
    opt = program.config.optimizer
    assert metrics["grad_norm"] > opt.clip_norm  # or this shows nothing
    state = program.init(0)
    before = jax.device_get(state.params)
    after, logged = program.train_step(state, batch)
    rate = opt.learning_rate / opt.warmup_steps
    np.testing.assert_allclose(float(logged["learning_rate"]), rate, rtol=1e-6)
    names = jax.tree.leaves(program.decoder.dims, is_leaf=lambda x: isinstance(x, tuple))
    trees = [jax.tree.leaves(tree) for tree in (before, grads, jax.device_get(after.params))]
    for dims, p, g, new in zip(names, *trees, strict=True):
        p, g = np.asarray(p, np.float64), np.asarray(g, np.float64) * opt.clip_norm / float(metrics["grad_norm"])
        direction = g / (np.abs(g) + opt.eps)  # both moments, bias-corrected, at the first step
        decay = 0 if {"vocab", "norm"} & set(dims) else opt.weight_decay
        np.testing.assert_allclose(new, p - rate * (direction + decay * p), rtol=2e-5, atol=2e-7, err_msg=str(dims))


def test_step_that_is_not_finite_changes_nothing(prepared):
    program, batch, _, _ = prepared
    state, _ = program.train_step(program.init(0), batch)
    good = jax.device_get(state)
    poisoned = state._replace(params=jax.tree.map(lambda p: p, state.params))
    poisoned.params["final_norm"]["scale"] = jax.device_put(
        jnp.full_like(state.params["final_norm"]["scale"], jnp.nan), state.params["final_norm"]["scale"].sharding
    )
    bad = jax.device_get(poisoned)
    state, metrics = program.train_step(poisoned, batch)
    assert (int(metrics["skipped_steps"]), int(metrics["bad_streak"])) == (1, 1)
    after = jax.device_get(state)
    assert int(after.step) == int(good.step) + 1
    for name in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(bad, name))
    repaired = jax.device_put(good.params, program.state_shardings.params)
    state, metrics = program.train_step(state._replace(params=repaired), batch)
    assert (int(metrics["skipped_steps"]), int(metrics["bad_streak"])) == (1, 0)


def test_muon_does_not_depend_on_the_mesh():
    optimizer = OptimizerConfig(name="muon", warmup_steps=1, learning_rate=0.02)
    losses = []
    for data, expert in ((1, 1), (2, 4)):
        run = tiny.config(data, expert, optimizer=optimizer, train=TrainConfig(steps=20))
        program = tiny.program(run)
        state = program.init(0)
        losses.append([])
        for step in range(3):
            state, metrics = program.train_step(state, program.put(tiny.batch(run, step)))
            losses[-1].append(float(metrics["loss"]))
        sharded = [leaf for leaf in jax.tree.leaves(state.opt_state) if not leaf.sharding.is_fully_replicated]
        assert len(sharded) > 10 or expert == 1  # moments lie where their parameters lie
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)


def test_bfloat16_follows_float32(prepared):
    """Gradients in bfloat16 point where those in float32 do, in every leaf, and come as float32."""
    program, _, want, metrics = prepared
    run = dataclasses.replace(program.config, model=dataclasses.replace(program.config.model, dtype="bfloat16"))
    half = tiny.program(run)
    state, rows = half.init(0), half.put(tiny.batch(run))
    evaluated = half.eval_step(state.params, rows)  # our own code promotes nothing
    per_token = float(evaluated["loss_sum"]) / int(evaluated["tokens"])
    np.testing.assert_allclose(per_token, float(metrics["ce_loss"]), rtol=5e-3)
    with jax.numpy_dtype_promotion("standard"):  # JAX's attention does, in its backward pass
        grads, half_metrics = jax.jit(half.gradients)(state.params, rows)
    np.testing.assert_allclose(float(half_metrics["ce_loss"]), float(metrics["ce_loss"]), rtol=5e-3)
    for got, exact in zip(jax.tree.leaves(jax.device_get(grads)), jax.tree.leaves(want), strict=True):
        assert got.dtype == np.float32
        cosine = np.sum(got * exact) / (np.linalg.norm(got) * np.linalg.norm(exact))
        assert cosine > 0.98


def test_global_norm_counts_every_parameter_once(prepared):
    _, _, grads, metrics = prepared
    np.testing.assert_allclose(float(metrics["grad_norm"]), float(optax.tree.norm(grads)), rtol=1e-5)
