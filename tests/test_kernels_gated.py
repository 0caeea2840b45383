"""Gate and up projections against float64, with gathered rows and route weights, and NaN where nothing is used."""

import jax
import kernels_oracle as oracle
import numpy as np
import pytest

from moejax.kernels import Kernel, Tiles, gated_matmul

T, M, K, F, G = 40, 90, 40, 24, 5
GPU = Tiles(16, 16, 16, 4, 2)
KERNELS = {
    "cpu": Kernel("cpu"),
    "gpu": Kernel("gpu", GPU, interpret=True),
    "gpu, reverse": Kernel("gpu", GPU, interpret=True, reverse=True),
}


def _oracle(x, gate_up, sizes, scale, grad):
    """Result, gradients of rows x and gate_up, and the summands of the gradient of scale, in float64."""
    live = np.arange(M) < sizes.sum()
    gate, up = np.split(oracle.gmm(x, gate_up, sizes), 2, axis=1)
    sigmoid = 1 / (1 + np.exp(-gate))
    hidden = gate * sigmoid * up
    grad = np.where(live[:, None], grad, 0).astype(np.float64)
    d_hidden = grad * scale[:, None]
    d_gate = d_hidden * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
    d_pre = np.concatenate([d_gate, d_hidden * gate * sigmoid], axis=1)
    d_x = oracle.gmm(d_pre, gate_up.swapaxes(1, 2), sizes)
    return hidden * scale[:, None], d_x, oracle.wgrad(x, d_pre, sizes), grad * hidden


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_result_and_gradients(kernel, gather):
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((T if gather else M, K)).astype(np.float32)
    gate_up = (rng.standard_normal((G, K, 2 * F)) / 4).astype(np.float32)
    scale, grad = rng.standard_normal(M).astype(np.float32), rng.standard_normal((M, F)).astype(np.float32)
    index = rng.integers(0, T, M).astype(np.int32) if gather else None

    @jax.jit
    def run(tokens, gate_up, scale, grad, sizes, index):
        def product(tokens, gate_up, scale):
            return gated_matmul(tokens, gate_up, sizes, scale, index, backend=KERNELS[kernel])

        out, pullback = jax.vjp(product, tokens, gate_up, scale)
        return out, *pullback(grad)

    for name, sizes in oracle.patterns(M, G, 16).items():
        live = int(sizes.sum())
        dead = np.arange(M) >= live
        used_index = None if index is None else np.where(dead, np.int32(2**30), index)
        used_tokens = tokens if gather else np.where(dead[:, None], np.float32(np.nan), tokens)
        poisoned = np.where(dead, np.float32(np.nan), scale), np.where(dead[:, None], np.float32(np.nan), grad)
        out, d_tokens, d_gate_up, d_scale = run(used_tokens, gate_up, *poisoned, sizes, used_index)
        x = tokens if index is None else tokens[index]
        want, d_x, want_gate_up, summands = _oracle(x, gate_up, sizes, scale, grad)
        assert oracle.worst_row_group(out, np.where(dead[:, None], 0, want), sizes) < 2e-6, name
        assert oracle.worst_weight_group(d_gate_up, want_gate_up, sizes) < 2e-6, name
        assert (np.asarray(d_scale)[dead] == 0).all(), name
        error = np.abs(d_scale - summands.sum(1))  # summands cancel: their magnitudes are the scale of rounding
        assert (error <= 2e-6 * np.abs(summands).sum(1)).all(), name
        if index is not None:
            want_tokens = np.zeros((T, K))
            np.add.at(want_tokens, index[:live], d_x[:live])
            assert oracle.relative_error(d_tokens, want_tokens) < 2e-6, name
        else:
            assert oracle.worst_row_group(d_tokens, d_x, sizes) < 2e-6, name
