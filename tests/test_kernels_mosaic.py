"""The Mosaic kernels in Pallas's GPU interpreter, with the patterns and bounds of the suite, and what they refuse."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu
from test_kernels_suite import check_patterns

from moejax.errors import UserError
from moejax.kernels import Kernel, Tiles, grouped_matmul

needs_interpreter = pytest.mark.skipif(
    not hasattr(mosaic_gpu, "InterpretGPUParams"), reason="the GPU interpreter of Mosaic came with jax 0.11"
)
TILES = Tiles(rows=64, cols=128, depth=64, stages=2)


@needs_interpreter
@pytest.mark.parametrize(
    ("reverse", "width"), [(True, 128), pytest.param(False, 256, marks=pytest.mark.slow)], ids=["reverse", "wide"]
)
def test_hard_patterns(reverse, width):
    """Rows are no multiple of a block; two steps of the contraction, and of columns where it is wide."""
    check_patterns(Kernel("mosaic", TILES, interpret=True, reverse=reverse), (150, 128, width, 5), "bfloat16")


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(70, 128, 128, 1), (14, 128, 128, 17)], ids=str)
def test_one_group_and_more_groups_than_rows(shape):
    check_patterns(Kernel("mosaic", TILES, interpret=True), shape, "bfloat16")


@needs_interpreter
@pytest.mark.parametrize(
    ("dtype", "width", "hidden", "message"),
    [
        ("float32", 128, 128, "multiplies bfloat16 only, not float32"),
        ("bfloat16", 96, 128, "K=96 must be a multiple of its tile 64"),
        ("bfloat16", 128, 192, "N=192 must be a multiple of its tile 128"),
    ],
)
def test_refuses_what_it_cannot_multiply(dtype, width, hidden, message):
    lhs, rhs = jnp.zeros((10, width), dtype), jnp.zeros((2, width, hidden), dtype)
    with pytest.raises(UserError, match=message):
        grouped_matmul(lhs, rhs, jnp.array([4, 5]), backend="mosaic")


@needs_interpreter
def test_tiles_that_two_workers_cannot_share_are_refused():
    lhs, rhs = jnp.zeros((10, 128), jnp.bfloat16), jnp.zeros((2, 128, 192), jnp.bfloat16)
    with pytest.raises(UserError, match=r"tile cols=192 must be a multiple of 128"):
        grouped_matmul(lhs, rhs, jnp.array([4, 5]), backend=Kernel("mosaic", Tiles(rows=64, cols=192, depth=64)))


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="this JAX has what the kernels need")
def test_old_jax_is_refused():
    lhs, rhs = jnp.zeros((10, 128), jnp.bfloat16), jnp.zeros((2, 128, 128), jnp.bfloat16)
    with pytest.raises(UserError, match=r"mosaic: needs jax 0\.11 or newer"):
        grouped_matmul(lhs, rhs, jnp.array([4, 5]), backend="mosaic")
