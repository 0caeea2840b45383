"""The expert FFN against float64: gathered rows, route weights, every activation, and NaN where nothing is used."""

import dataclasses

import jax
import jax.numpy as jnp
import kernels_oracle as oracle
import numpy as np
import pytest

from moejax.kernels import Kernel, Tiles, expert_ffn
from moejax.kernels.gpu_ffn import fit
from moejax.nn.activations import ACTIVATIONS, num_inner

T, M, D, F, G = 40, 90, 40, 24, 5
GPU = Tiles(16, 16, 16, 4, 2)
KERNELS = {
    "cpu": Kernel("cpu"),
    "gpu": Kernel("gpu", GPU, interpret=True),
    "gpu, reverse": Kernel("gpu", GPU, interpret=True, reverse=True),
}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def swiglu(gate, up):
    s = sigmoid(gate)
    return gate * s * up, (up * (s + gate * s * (1 - s)), gate * s)


def geglu(gate, up):
    c = np.sqrt(2 / np.pi)
    t = np.tanh(c * (gate + 0.044715 * gate**3))
    slope = 0.5 * (1 + t) + 0.5 * gate * (1 - t * t) * c * (1 + 3 * 0.044715 * gate**2)
    return 0.5 * gate * (1 + t) * up, (slope * up, 0.5 * gate * (1 + t))


def clamped_swiglu(gate, up):
    g, u = np.minimum(gate, 7), np.clip(up, -7, 7)
    s = sigmoid(1.702 * g)
    d_gate = np.where(gate < 7, (u + 1) * (s + 1.702 * g * s * (1 - s)), 0)
    return g * s * (u + 1), (d_gate, np.where(np.abs(up) < 7, g * s, 0))


def relu2(_, up):
    return np.maximum(up, 0) ** 2, (2 * np.maximum(up, 0),)


TRUTH = {f.__name__: f for f in (swiglu, geglu, clamped_swiglu, relu2)}


def _oracle(activation, x, up, down, sizes, scale, grad):
    """Result, gradients of x, up, down, and the summands of the gradient of scale, in float64."""
    pre = np.split(oracle.gmm(x, up.reshape(G, D, -1), sizes), up.shape[2], axis=1)
    hidden, slopes = TRUTH[activation](pre[0], pre[-1])
    d_hidden = oracle.gmm(grad, down.swapaxes(1, 2), sizes)
    weighted = hidden * scale[:, None]
    d_pre = np.concatenate([d_hidden * scale[:, None] * slope for slope in slopes], axis=1)
    d_x = oracle.gmm(d_pre, up.reshape(G, D, -1).swapaxes(1, 2), sizes)
    d_up = oracle.wgrad(x, d_pre, sizes).reshape(up.shape)
    return oracle.gmm(weighted, down, sizes), d_x, d_up, oracle.wgrad(weighted, grad, sizes), d_hidden * hidden


BOUND = {
    "geglu": 4e-6
}  # its slope has 1 - tanh^2, which cancels: 5 times swiglu's error in float32, without any kernel

CASES = [(kernel, "swiglu", gather, True) for kernel in KERNELS for gather in (False, True)] + [
    ("gpu", "clamped_swiglu", False, True),
    ("gpu", "geglu", False, False),
    ("gpu", "relu2", True, True),
    ("cpu", "relu2", False, False),
]


@pytest.mark.parametrize(("kernel", "activation", "gather", "scaled"), CASES)
def test_result_and_gradients(kernel, activation, gather, scaled):
    rng, inner, bound = np.random.default_rng(0), num_inner(activation), BOUND.get(activation, 2e-6)
    spread = 2 if activation == "clamped_swiglu" else 1  # so that some values are clamped
    tokens = (rng.standard_normal((T if gather else M, D)) * spread).astype(np.float32)
    up = (rng.standard_normal((G, D, inner, F)) / 4).astype(np.float32)
    down = (rng.standard_normal((G, F, D)) / 4).astype(np.float32)
    scale = rng.standard_normal(M).astype(np.float32) if scaled else np.ones(M, np.float32)
    grad = rng.standard_normal((M, D)).astype(np.float32)
    index = rng.integers(0, T, M).astype(np.int32) if gather else None

    @jax.jit
    def run(tokens, up, down, scale, grad, sizes, index):
        def ffn(tokens, up, down, scale):
            weight = scale if scaled else None
            function = ACTIVATIONS[activation]
            return expert_ffn(tokens, up, down, sizes, weight, index, activation=function, backend=KERNELS[kernel])

        out, pullback = jax.vjp(ffn, tokens, up, down, scale)
        return out, *pullback(grad)

    for name, sizes in oracle.patterns(M, G, 16).items():
        live = int(sizes.sum())
        dead = np.arange(M) >= live
        used_index = None if index is None else np.where(dead, np.int32(2**30), index)
        used_tokens = tokens if gather else np.where(dead[:, None], np.float32(np.nan), tokens)
        poisoned = np.where(dead, np.float32(np.nan), scale), np.where(dead[:, None], np.float32(np.nan), grad)
        out, d_tokens, d_up, d_down, d_scale = run(used_tokens, up, down, *poisoned, sizes, used_index)
        x = tokens if index is None else tokens[index]
        want, d_x, want_up, want_down, summands = _oracle(activation, x, up, down, sizes, scale, grad)
        assert oracle.worst_row_group(out, want, sizes) < bound, name
        assert oracle.worst_weight_group(d_up, want_up, sizes) < bound, name
        assert oracle.worst_weight_group(d_down, want_down, sizes) < bound, name
        assert (np.asarray(d_scale)[dead] == 0).all(), name
        # summands cancel: their magnitudes are the scale of rounding
        error = np.abs(d_scale - summands.sum(1)) if scaled else np.abs(d_scale)
        assert (error <= bound * np.abs(summands).sum(1)).all(), name
        if index is not None:
            want_tokens = np.zeros((T, D))
            np.add.at(want_tokens, index[:live], d_x[:live])
            assert oracle.relative_error(d_tokens, want_tokens) < bound, name
        else:
            assert oracle.worst_row_group(d_tokens, d_x, sizes) < bound, name


@pytest.mark.parametrize("kernel", ["cpu", "gpu"])
def test_bfloat16_and_many_rows_of_one_token(kernel):
    """What a step keeps is rounded to bfloat16; activations, and the sum over a token's 60 rows, are float32."""
    rng = np.random.default_rng(1)
    x, up, down = (rng.standard_normal(s) / f for s, f in (((T, D), 1), ((G, D, 2, F), 6), ((G, F, D), 5)))
    x, up, down, grad = (oracle.round_to(a, "bfloat16") for a in (x, up, down, rng.standard_normal((M, D)) + 0.5))
    scale = rng.random(M).astype(np.float32)
    index = np.where(np.arange(M) % 3, 7, rng.integers(0, T, M)).astype(np.int32)
    sizes = np.array([31, 0, 20, 1, 38], np.int32)
    sizes_G, at = jnp.asarray(sizes), jnp.asarray(index)

    @jax.jit
    def run(x, up, down, scale, grad):
        def ffn(x, up, down, scale):
            swiglu = ACTIVATIONS["swiglu"]
            return expert_ffn(x, up, down, sizes_G, scale, at, activation=swiglu, backend=KERNELS[kernel])

        out, pullback = jax.vjp(ffn, x, up, down, scale)
        return out, *pullback(grad)

    out, d_x, d_up, d_down, d_scale = run(x, up, down, scale, grad)
    f64 = [a.astype(np.float64) for a in (x[index], up, down)]
    want, rows, want_up, want_down, summands = _oracle("swiglu", *f64, sizes, scale, grad.astype(np.float64))
    want_x = np.zeros((T, D))
    np.add.at(want_x, index, rows)
    assert {a.dtype.name for a in (out, d_x, d_up, d_down)} == {"bfloat16"}
    assert oracle.worst_row_group(out, want, sizes) < 6e-3
    assert oracle.worst_weight_group(d_up, want_up, sizes) < 6e-3
    assert oracle.worst_weight_group(d_down, want_down, sizes) < 6e-3
    assert oracle.relative_error(d_x, want_x) < 6e-3
    assert oracle.relative_error(d_x[7], want_x[7]) < 4e-3
    assert oracle.relative_error(d_scale, summands.sum(1)) < 6e-3


@pytest.mark.parametrize(
    ("tiles", "blocks", "cols"),
    [
        (Tiles(128, 128, 64, 8), 2, 128),
        (Tiles(128, 128, 64, 4), 2, 64),
        (Tiles(128, 256, 64, 8), 2, 128),
        (Tiles(128, 256, 64, 8), 1, 256),
        (Tiles(64, 128, 64, 4), 2, 128),
    ],
)
def test_tiles_tuned_for_a_matmul_fit_the_registers_of_the_fused_kernels(tiles, blocks, cols):
    assert fit(tiles, blocks) == dataclasses.replace(tiles, cols=cols)


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (ValueError, {"up": np.zeros((G, D, 3, F), np.float32)}),
        (ValueError, {"down": np.zeros((G, D, F), np.float32)}),
        (ValueError, {"group_sizes": np.zeros(G + 1, np.int32)}),
        (ValueError, {"scale": np.zeros(M - 1, np.float32)}),
        (ValueError, {"index": np.zeros(7, np.int32), "scale": np.zeros(M, np.float32)}),
        (TypeError, {"down": np.zeros((G, F, D), np.float16)}),
        (TypeError, {"scale": np.zeros(M, np.float16)}),
        (TypeError, {"index": np.zeros(M, np.float32)}),
        (TypeError, {"group_sizes": np.zeros(G, np.float32)}),
    ],
)
def test_arguments_that_do_not_fit(error, changes):
    zeros = {
        "lhs": np.zeros((M, D), np.float32),
        "up": np.zeros((G, D, 2, F), np.float32),
        "down": np.zeros((G, F, D), np.float32),
        "group_sizes": np.zeros(G, np.int32),
    }
    with pytest.raises(error, match="expert_ffn: (shapes|types) do not fit"):
        expert_ffn(**zeros | changes, activation=ACTIVATIONS["swiglu"])
