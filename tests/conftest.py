"""Every test runs on eight simulated CPU devices, with strict dtype promotion; warnings are errors (pyproject.toml)."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

NUM_DEVICES = 8

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session", autouse=True)
def _eight_devices() -> None:
    assert jax.device_count() == NUM_DEVICES
