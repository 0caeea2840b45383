"""One suite for every backend, direction, type and group pattern, against NumPy float64 on the rounded inputs.

The bound is on the worst group's relative Frobenius error, so that one wrong expert among many is seen.
Rows past the sum hold NaN in the operands and in the incoming gradient. Pallas kernels run in interpret mode,
tiles first to last and last to first: running in order hides a missing mask. Group sizes are data, so
all patterns of a shape share one compilation.
"""

import jax
import kernels_oracle as oracle
import numpy as np
import pytest

from moejax.kernels import Kernel, Tiles, dispatch, grouped_matmul

TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3}
GPU, TPU = Tiles(rows=16, cols=32, depth=16, warps=4, stages=2), Tiles(rows=16, cols=128, depth=128)

KERNELS = {
    "reference": Kernel("reference"),
    "cpu": Kernel("cpu"),
    "cpu, whole windows": Kernel("cpu", Tiles(rows=2)),
    "xla": Kernel("xla"),
    "padded": Kernel("padded"),
    "gpu": Kernel("gpu", GPU, interpret=True),
    "gpu, reverse": Kernel("gpu", GPU, interpret=True, reverse=True),
    "tpu": Kernel("tpu", TPU, interpret=True),
    "tpu, reverse": Kernel("tpu", TPU, interpret=True, reverse=True),
}
SHAPES = {  # M, K, N, G: no dim is a multiple of a tile
    "several groups": (90, 150, 70, 5),
    "one group": (37, 20, 33, 1),
    "more groups than rows": (120, 9, 11, 257),
}


def _operands(shape: tuple[int, int, int, int], dtype: str):
    m, k, n, groups = shape
    rng = np.random.default_rng(3)
    return tuple(
        oracle.round_to(rng.standard_normal(size), dtype) for size in ((m, k), (groups, k, n), (m, n), (groups, k, n))
    )


def _poison(array: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    array = array.copy()
    array[int(sizes.sum()) :] = np.nan
    return array


def check_patterns(kernel: Kernel, shape: tuple[int, int, int, int], dtype: str) -> None:
    """All directions of one kernel and shape, under every pattern of group sizes."""
    lhs, rhs, grad, old = _operands(shape, dtype)
    old = old.astype(np.float32)

    @jax.jit
    def run(lhs, rhs, sizes, grad, old):
        out, pullback = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes, backend=kernel), lhs, rhs)
        return out, *pullback(grad), dispatch.wgrad(lhs, grad, sizes, kernel=kernel, accumulator=old)

    tile = kernel.tiles.rows if kernel.tiles else 32
    for name, sizes in oracle.patterns(shape[0], shape[3], tile).items():
        out, grad_lhs, grad_rhs, total = run(_poison(lhs, sizes), rhs, sizes, _poison(grad, sizes), old)
        weight = oracle.wgrad(lhs, grad, sizes)
        assert oracle.worst_row_group(out, oracle.gmm(lhs, rhs, sizes), sizes) <= TOLERANCE[dtype], name
        want = oracle.gmm(grad, rhs.swapaxes(1, 2), sizes)
        assert oracle.worst_row_group(grad_lhs, want, sizes) <= TOLERANCE[dtype], name
        assert oracle.worst_weight_group(grad_rhs, weight, sizes) <= TOLERANCE[dtype], name
        assert (np.asarray(total)[sizes == 0] == old[sizes == 0]).all(), name
        assert max(map(oracle.relative_error, total, weight + old)) <= 1e-6, name
        assert (out.dtype, grad_lhs.dtype, grad_rhs.dtype, total.dtype) == (lhs.dtype, lhs.dtype, rhs.dtype, np.float32)


def _cases():
    """Everything; what adds time without a new kind of failure is left to `-m slow`."""
    for name, kernel in KERNELS.items():
        for shape in SHAPES:
            for dtype in TOLERANCE:
                first = shape == "several groups"
                quick = not kernel.pallas or first or (dtype == "float32" and not kernel.reverse)
                quick = quick and not (kernel.reverse and dtype == "bfloat16")
                yield pytest.param(name, shape, dtype, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("kernel", "shape", "dtype"), list(_cases()))
def test_hard_patterns(kernel, shape, dtype):
    check_patterns(KERNELS[kernel], SHAPES[shape], dtype)
