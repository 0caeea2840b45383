"""Every test runs on eight simulated CPU devices, with strict dtype promotion; warnings are errors (pyproject.toml)."""

import os
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Tests compile many small programs and run each for a moment, so XLA optimises little: compiling is 5 to 8 times
# quicker. Subprocesses inherit this. Collectives and memory do not depend on it (they come from earlier passes).
FAST_COMPILE = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if version("jaxlib").startswith("0.10."):
    FAST_COMPILE.append("--xla_cpu_use_fusion_emitters=false")  # later versions do not know this flag
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FAST_COMPILE]).strip()

import jax  # noqa: E402
import pytest  # noqa: E402

NUM_DEVICES = 8

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session", autouse=True)
def _eight_devices() -> None:
    assert jax.device_count() == NUM_DEVICES
