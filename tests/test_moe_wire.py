"""Rows that cross in MXFP8: the layer equals one whose experts see rounded rows, and bytes are what they should be."""

import dataclasses

import jax
import numpy as np
import pytest
import test_moe_exchange as layer
import tiny
from test_mx_training import rounded

from moejax.config import Config, MeshConfig, MoEConfig
from moejax.errors import UserError
from moejax.moe import rows
from moejax.moe.exchange import row_bytes
from moejax.plan.hlo import collectives

WIDTH = 32


def straight_through(x):
    """Rounded, with the gradient of x."""
    return x + jax.lax.stop_gradient(rounded(x) - x)


@pytest.mark.parametrize(
    ("exchange", "ranks", "top_k", "deduplicate"),
    [
        ("padded", 2, 8, True),
        ("ragged", 8, 2, False),
        pytest.param("padded", 4, 2, False, marks=pytest.mark.slow),
        pytest.param("ragged", 4, 8, True, marks=pytest.mark.slow),
    ],
)
def test_experts_see_rounded_rows_and_gradients_are_exact(monkeypatch, exchange, ranks, top_k, deduplicate):
    monkeypatch.setattr(rows, "UNWRITTEN", np.nan)
    monkeypatch.setattr(layer, "D", WIDTH)
    a = layer.data("padding")
    config = layer.run_config(exchange, ranks, top_k, deduplicate=deduplicate, wire="mxfp8")
    plain = dataclasses.replace(config, moe=dataclasses.replace(config.moe, wire=None))
    compiled = layer.layer_function(config).lower(a).compile()
    y, grads, facts, statistics = jax.device_get(compiled(a))
    want_y, want, want_facts, want_statistics = jax.device_get(layer.layer_function(plain, straight_through)(a))
    layer.assert_close(y, want_y, "y")
    for name, value in want.items():
        layer.assert_close(grads[name], value, f"d{name}", name in ("gate_up", "down"))
    np.testing.assert_array_equal(facts["kept"], want_facts["kept"])
    assert statistics.sent == want_statistics.sent
    _check_bytes(str(compiled.as_text()), exchange, config, min(top_k, layer.E // ranks) if deduplicate else 1)


def _check_bytes(text: str, exchange: str, config: Config, lanes: int) -> None:
    """One collective of bytes: values, scales, and four bytes for the weight and place of each route."""
    kind = "all-to-all" if exchange == "padded" else "all-gather"  # the emulation of CPUs
    found = [item for item in collectives(text) if item.kind == kind and item.dtype == "u8"]
    assert len(found) == 1
    places = exchange == "padded" or config.moe.deduplicate
    assert row_bytes(config) == (WIDTH + 1, 4 * WIDTH)
    assert found[0].shapes[0][-1] == WIDTH + 1 + 4 * lanes * (2 if places else 1)


def test_error_of_the_layer_is_that_of_a_rounding(monkeypatch):
    monkeypatch.setattr(layer, "D", WIDTH)
    a = layer.data("even")
    config = layer.run_config("padded", 2, 2, wire="mxfp8")
    plain = dataclasses.replace(config, moe=dataclasses.replace(config.moe, wire=None))
    y, want = (np.asarray(layer.layer_function(run)(a)[0], np.float64) for run in (config, plain))
    error = np.linalg.norm(y - want) / np.linalg.norm(want)
    assert 1e-3 < error < 5e-2


@pytest.mark.parametrize(
    ("expert", "moe", "message"),
    [
        (1, MoEConfig(wire="mxfp8"), "moe.exchange=local"),
        (2, MoEConfig("gather", wire="mxfp8"), "moe.exchange=gather"),
        (2, MoEConfig(wire="bfloat16"), "model.dtype=float32"),
    ],
)
def test_a_wire_without_effect_is_refused(expert, moe, message):
    with pytest.raises(UserError, match=f"moe.wire=.*{message}"):
        tiny.config(mesh=MeshConfig(expert=expert), moe=moe)
