"""Training runs whose routing goes right, by the bias controller, or wrong, by too large a balance loss."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from train_toy import ToyProgram, toy_config, toy_trainer

from moejax.config import DataConfig, LayerGroup, LossConfig, MoEModelConfig, OptimizerConfig
from moejax.moe.alarm import COUNT, IMBALANCE, LOSS, WINDOW, GerrymanderingAlarm


def run_of(moe: MoEModelConfig, layers: int, rows: int, loss: LossConfig, rate: float, mesh: tuple[int, int, int]):
    """A run of MoE layers alone, on data x expert devices and in microbatches."""
    model = dataclasses.replace(tiny.MODEL, layers=(LayerGroup(layers),), moe=moe)
    optimizer = OptimizerConfig(learning_rate=rate, warmup_steps=0, schedule="constant")
    run = tiny.config(*mesh, model=model, loss=loss, optimizer=optimizer)
    return dataclasses.replace(run, data=DataConfig(batch_size=rows, sequence_length=16))


def test_bias_controller_balances_a_skewed_router_without_a_loss():
    """Two experts get every token of a layer: 8 times the mean. From step 40 on none gets 1.3 times.

    A step has 250 routes an expert, and its own noise may reach that: medians of 20 steps are taken, and sums.
    """
    moe = dataclasses.replace(
        tiny.MODEL.moe,
        num_experts=16,
        scores="sigmoid",
        selection_bias=True,
        router_bias=True,
        shared_dim=0,
    )
    loss = LossConfig(balance_weight=0.0, z_weight=0.0, bias_rate=0.005)
    program = tiny.program(run := run_of(moe, 2, 128, loss, 1e-4, (2, 4, 2)))
    state = program.init(0)
    params = jax.device_get(state.params)
    skewed: Any = np.zeros((2, 16), np.float32)
    skewed[[0, 0, 1, 1], [0, 5, 3, 5]] = 3.0
    params["groups_0"]["0"]["ffn"]["router_bias"] = skewed
    state = state._replace(params=jax.device_put(params, program.state_shardings.params))
    counts = []
    for step in range(60):
        state, metrics = program.train_step(state, program.put(tiny.batch(run, step)))
        counts.append(np.asarray(metrics["moe/requested"]))
    load = lambda c: c.max(-1) / c.mean(-1)  # noqa: E731
    loads = load(np.asarray(counts))
    assert loads[0].min() > 4
    assert np.median(loads[40:], axis=0).max() < 1.3, loads
    assert load(np.sum(counts[40:], axis=0)).max() < 1.3, loads
    bias = np.asarray(state.params["groups_0"]["0"]["ffn"]["selection_bias"])
    np.testing.assert_allclose(bias.mean(1), 0, atol=1e-6)


def routed(weight: float, steps: int = 160) -> tuple[list[float], list[float], int]:
    """Balance loss and load of a run that learns what follows a token of a skewed vocabulary; and its alarms."""
    moe = dataclasses.replace(tiny.MODEL.moe, top_k=1, merge="raw", shared_dim=0)
    loss = LossConfig(balance_weight=weight, z_weight=0.0)
    program = tiny.program(run := run_of(moe, 1, 32, loss, 3e-3, (2, 2, 1)))
    rng, state, alarm, rows = np.random.default_rng(0), program.init(0), GerrymanderingAlarm(), []
    follows, share = rng.permutation(32), 1 / np.arange(1, 33)
    for step in range(steps):
        batch = tiny.batch(run, step)
        tokens, noise = rng.choice(32, (2, *batch["tokens"].shape), p=share / share.sum()).astype(np.int32)
        targets = np.where(rng.random(tokens.shape) < 0.7, follows[tokens], noise).astype(np.int32)
        state, metrics = program.train_step(state, program.put(batch | {"tokens": tokens, "targets": targets}))
        rows.append({name: float(metrics[name]) for name in (LOSS, IMBALANCE)})
        alarm.update(rows[-1])
    return [row[LOSS] for row in rows], [row[IMBALANCE] for row in rows], alarm.count


def test_a_run_with_too_large_a_balance_weight_shows_the_alarm():
    losses, loads, alarms = routed(10.0)
    assert alarms >= 1
    assert np.median(losses[-40:]) < np.median(losses[:40]) - 0.01
    assert np.median(loads[-40:]) > 1.3 * np.median(loads[:40])  # and the loss is nearly that of perfect balance:
    assert np.median(losses[-40:]) < 1.03


@pytest.mark.slow
def test_a_run_with_a_small_balance_weight_shows_none():
    losses, loads, alarms = routed(0.01)
    assert alarms == 0
    assert np.median(loads[-40:]) < 1.1 * np.median(loads[:40])
    assert np.median(losses[-40:]) > 1.1  # here the loss tells


class Gerrymandering(ToyProgram):
    """A program whose load rises while its balance loss falls."""

    def _step(self, state, batch, poison):
        step = state.step.astype(np.float32)
        state, metrics = super()._step(state, batch, poison)
        return state, metrics | {LOSS: 2 - 0.01 * step, IMBALANCE: 1 + 0.1 * step}


def test_alarm_and_routing_that_is_not_learned_are_in_the_log(tmp_path, capsys):
    config = toy_config(tmp_path, f"train.steps={2 * WINDOW + 1}", "moe.routing=random", "eval.every=100")
    rows = toy_trainer(config, program=lambda config, poison: Gerrymandering(config)).run()
    said = capsys.readouterr()
    lines = (said.out + said.err).splitlines()
    assert any("moe.routing=random: a benchmark mode" in line for line in lines), lines
    assert sum("warning: the balance loss fell from" in line for line in lines) == 1, lines
    assert [row[COUNT] for row in rows] == [0] * (2 * WINDOW - 1) + [1, 1]
