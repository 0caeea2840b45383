"""The gerrymandering alarm, on a router that is trained into it, and `moejax inspect routing`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.cli.main import main
from moejax.config import MoEModelConfig
from moejax.moe.alarm import IMBALANCE, LOSS, WINDOW, GerrymanderingAlarm
from moejax.moe.balance import sequence_sum
from moejax.moe.router import RouterWeights, route
from moejax.moe.statistics import count_experts, max_over_mean

GROUPS = np.repeat([0, 1, 1, 2], 16)  # a quarter, a half, a quarter of the tokens


def train_router(weight: float, steps: int = 120) -> tuple[list[dict], int]:
    """Two experts; the task wants the first group on expert 0 and the others on expert 1; the third comes late."""
    x = jnp.asarray(np.eye(3)[GROUPS], jnp.float32)
    valid, model = jnp.ones(len(GROUPS), bool), MoEModelConfig(num_experts=2, top_k=1, merge="raw")
    wanted = jnp.asarray(GROUPS != 0, jnp.int32)

    def loss(router):
        chosen = route(x, valid, RouterWeights(router), model)
        balance = sequence_sum(chosen, valid[None]) / len(GROUPS)
        task = -jnp.mean(jnp.log(jnp.take_along_axis(chosen.score_TE, wanted[:, None], 1)))
        return task + weight * balance, (balance, max_over_mean(count_experts(chosen.expert_TK, 2)))

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    router = jnp.asarray([[1.5, -1.5], [-0.1, 0.1], [0.5, -0.5]])
    alarm, rows = GerrymanderingAlarm(), []
    for _ in range(steps):
        (_, (balance, load)), gradient = step(router)
        router = router - 0.2 * gradient
        rows.append({LOSS: float(balance), IMBALANCE: float(load)})
        alarm.update(rows[-1])
    return rows, alarm.count


def test_alarm_goes_off_under_a_large_balance_weight_and_not_under_a_small_one():
    rows, alarms = train_router(1.8)
    assert alarms == 1
    assert rows[0][LOSS] == pytest.approx(1.0, abs=1e-5)
    assert rows[-1][LOSS] < 0.95  # better than perfect balance,
    assert rows[-1][IMBALANCE] == 1.5  # at three quarters of the tokens on one expert
    rows, alarms = train_router(0.01)
    assert alarms == 0
    assert rows[-1][IMBALANCE] == 1.5
    assert rows[-1][LOSS] > 1.1  # here the loss tells


def test_noise_is_no_alarm():
    """Loads of one distribution in all steps, while the loss falls."""
    for seed in range(3):
        rng, alarm = np.random.default_rng(seed), GerrymanderingAlarm()
        for step in range(2000):
            alarm.update({LOSS: 1.2 - 2e-4 * step, IMBALANCE: 1.8 * np.exp(0.2 * rng.standard_normal())})
        assert alarm.count == 0


def test_alarm_is_silent_without_metrics_and_counts_each_time_once():
    alarm = GerrymanderingAlarm()
    for value in np.linspace(1, 2, 2 * WINDOW):
        alarm.update({LOSS: 1.0, IMBALANCE: value})  # load alone
        alarm.update({"loss": 3.0})
        alarm.update({LOSS: None, IMBALANCE: 1.0})
    assert alarm.count == 0
    texts = [alarm.update({LOSS: 2 - value, IMBALANCE: value}) for value in np.linspace(1, 1.9, 6 * WINDOW)]
    assert sum(text is not None for text in texts) == alarm.count >= 2
    assert "loss.balance_weight" in next(text for text in texts if text)


def test_inspect_routing_prints_and_draws(tmp_path, capsys):
    rng, lines = np.random.default_rng(0), []
    for step in range(10, 810, 10):
        requested = rng.multinomial(1000, np.ones(8) / 8, size=3)
        requested[1] = [800 - step, 200 + step, 0, 0, 0, 0, 0, 0]
        pairs = [[[step, 3 * step], [500, 500]]] * 2
        row = {"step": step, "loss": 1.0, "moe/requested": requested.tolist(), "moe/pairs": pairs}
        lines.append(json.dumps(row))
    lines.insert(3, json.dumps({"step": 15, "loss": 1.0}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    picture = tmp_path / "routing.png"
    assert main(["inspect", "routing", str(tmp_path), "--png", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "3 MoE layers, 8 experts" in out
    assert "steps 10 to 800" in out
    row = next(line for line in out.splitlines() if line.startswith("layer   1"))
    assert row.endswith("@|")
    assert len(row.split("|")[1]) == 64
    assert "without a token in the last step: 0, 7, 0" in out
    assert out.splitlines()[-3:-1] == ["from   0 |  25%  75%", "from   1 |  50%  50%"]
    assert picture.stat().st_size > 5000


def test_inspect_routing_refuses_other_folders(tmp_path, capsys):
    assert main(["inspect", "routing", str(tmp_path)]) == 2
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert main(["inspect", "routing", str(tmp_path)]) == 2
    assert "no routing was logged" in capsys.readouterr().err
