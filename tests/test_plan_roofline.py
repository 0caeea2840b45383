"""The report's analytic figures."""

import math

import numpy as np
import pytest

from moejax.plan.roofline import Pair, intensity
from moejax.plan.target import names, read_target

DENSE, MOE = Pair(4, 4096, 4096), Pair(4, 4096, 4096, experts=64)
BALANCE = 281.25  # B300: 2,250 TFLOP/s over 8 TB/s


@pytest.mark.parametrize(
    ("tokens", "dense", "moe"),
    [
        (64, 0.2235, 0.0142),
        (128, 0.4391, 0.0284),
        (256, 0.8484, 0.0565),
        (512, 1.0, 0.1123),
        (1024, 1.0, 0.2218),
        (2048, 1.0, 0.4326),
        (4096, 1.0, 0.8244),
        (8192, 1.0, 1.0),
    ],
)
def test_figure_2_curves(tokens: int, dense: float, moe: float) -> None:
    assert DENSE.ceiling(tokens, BALANCE) == pytest.approx(dense, abs=5e-5)
    assert MOE.ceiling(tokens, BALANCE) == pytest.approx(moe, abs=5e-5)


def test_figure_2_reaches_the_ceiling() -> None:
    assert math.ceil(DENSE.tokens_to_ceiling(BALANCE)) == 308
    assert math.ceil(MOE.tokens_to_ceiling(BALANCE)) == 5217
    for pair in (DENSE, MOE):
        tokens = pair.tokens_to_ceiling(BALANCE)
        assert pair.ceiling(tokens * 1.001, BALANCE) == pytest.approx(1)
        assert pair.ceiling(tokens * 0.999, BALANCE) < 1


def test_figure_2_byte_ratios() -> None:
    moe, dense = MOE.traffic(1000), DENSE.traffic(1000)
    assert [moe[name] / dense[name] for name in dense] == [16, 4, 4, 1]


@pytest.mark.parametrize("pair", [DENSE, MOE])
def test_bytes_by_kind_are_the_bytes_of_both_matmuls(pair: Pair) -> None:
    assert sum(pair.traffic(777).values()) == pytest.approx(sum(pair.bytes(777)))


def test_intensity_of_few_rows_is_their_number() -> None:
    assert intensity(8, 4096, 4096) == pytest.approx(8, rel=0.01)
    np.testing.assert_allclose(intensity(1e9, 4096, 4096), 2048, rtol=1e-4)


def test_targets_are_read_and_plausible() -> None:
    wanted = {"cpu", "h100x8", "h200x8", "b200x8", "b300x8", "gb200-nvl72", "v5e", "v5p", "v6e", "tpu7x"}
    assert set(names()) == wanted
    for name in names():
        target = read_target(name)
        assert target.peak["float8"] >= target.peak["bfloat16"] >= target.peak["float32"] > 0
        assert target.links[-1].devices is None
        assert target.platform == "cpu" or 100 < target.balance < 600
        for devices, shape in (target.topologies or {}).items():
            per_chip = 2 if name == "tpu7x" else 1
            assert per_chip * np.prod([int(size) for size in shape.split("x")]) == devices
    assert read_target("b300x8").balance == BALANCE


def test_a_ring_inside_a_node_and_ports_between_nodes() -> None:
    target = read_target("h200x8")
    inside, across = range(8), range(16)
    assert target.sent("all-gather", 800, inside) == [700, 0]
    assert target.sent("all-gather", 1600, across) == [1400, 100]  # 8 ports of each node share the other node's half
    assert target.sent("all-to-all", 1600, across) == [700, 800]
    assert target.sent("all-reduce", 1600, range(0, 64, 8)) == [0, 2 * 1400]
    assert target.seconds("all-gather", 1600, across) == pytest.approx(1400 / 4.5e11 + 100 / 5e10)
