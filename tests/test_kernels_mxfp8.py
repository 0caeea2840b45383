"""MXFP8: bit-exact against NumPy on hard values, and errors of the grouped matmul and its gradients."""

import jax
import jax.numpy as jnp
import kernels_oracle as oracle
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.kernels import (
    MXOptions,
    dequantize,
    grouped_matmul,
    merge,
    mx_grouped_matmul,
    quantize,
    quantize_weight,
    split_constants,
)


def numpy_quantize(x: np.ndarray, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Along the last axis, by logarithms in float64: bytes of the values and of the scales."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, 32)
    blocks = np.where(np.abs(blocks) < 2.0**-126, 0, blocks)
    largest = np.abs(blocks).max(-1)
    finite = np.isfinite(largest)
    with np.errstate(divide="ignore", invalid="ignore"):
        if mode == "floor":
            exponent = np.floor(np.log2(largest)) - 8
        else:
            exponent = np.ceil(np.log2(largest / 448))
    exponent = np.where(largest == 0, -127, np.clip(np.where(finite, exponent, 0), -127, 127))
    scaled = np.clip(blocks / 2.0 ** exponent[..., None], -448, 448)
    scaled = np.where(finite[..., None], scaled, np.nan)
    values = scaled.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(x.shape)
    return values, np.where(finite, exponent + 127, 255).astype(np.uint8)


def _edge_values() -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal((32, 64)) * 10.0 ** rng.integers(-37, 37, (32, 1))]
    rows.append(np.where(rng.random((16, 64)) < 0.05, 448 * 2.0 ** rng.integers(-12, 12, (16, 64)), 0))
    for largest in (448, 449, 256, 224, 225, 500, 511.9, 512, 1, 0, 1e20, 3.0e38, 2.0**-126, 2.0**-118, 1e-45):
        row = np.linspace(0, largest, 64)
        row[32:] = -largest * 2.0 ** -np.arange(32)
        rows.append(row[None])
    rows.append(np.linspace(-464, 464, 2048 * 8).reshape(-1, 64))  # every rounding of E4M3, ties among them
    special = np.ones((3, 64))
    special[0, 3], special[1, 40], special[2, 0] = np.nan, np.inf, -np.inf
    rows.append(special)
    return np.concatenate(rows).astype(np.float32)


@pytest.mark.parametrize("mode", ["round_ceiling", "floor"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_equal_numpy(mode, dtype):
    x = oracle.round_to(_edge_values(), dtype)
    got = jax.jit(quantize, static_argnames="mode")(x, mode=mode)
    values, scales = numpy_quantize(x.astype(np.float32), mode)
    np.testing.assert_array_equal(np.asarray(got.scales), scales)
    np.testing.assert_array_equal(np.asarray(got.values).view(np.uint8), values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dequantize_is_exact_and_idempotent(dtype):
    x = _edge_values()
    mx = quantize(x)
    scale = np.where(np.asarray(mx.scales) == 255, np.nan, 2.0 ** (np.asarray(mx.scales).astype(np.float64) - 127))
    want = np.asarray(mx.values).astype(np.float64).reshape(-1, 2, 32) * scale[..., None]
    want = np.where(np.abs(want) < 2.0**-126, 0, want).reshape(x.shape)
    got = dequantize(mx, jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), want)
    np.testing.assert_array_equal(np.asarray(dequantize(quantize(got))).astype(np.float64), want)


def test_blocks_along_any_axis():
    x = np.random.default_rng(1).standard_normal((3, 64, 96)).astype(np.float32)
    along_k = quantize(x, axis=1)
    assert along_k.scales.shape == (3, 2, 96)
    np.testing.assert_array_equal(dequantize(along_k), dequantize(quantize(x.swapaxes(1, 2))).swapaxes(1, 2))
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize(x[:, :33], axis=1)


@pytest.mark.parametrize(("mode", "share", "worst"), [("round_ceiling", 0, 1 / 17), ("floor", 0.193, 1 / 8)])
def test_only_floor_saturates(mode, share, worst):
    """Of blocks of log-uniform magnitude, floor clips those in (448, 512) of every octave: log2(512 / 448)."""
    rng = np.random.default_rng(2)
    x = np.ones((20_000, 32), np.float32)
    x[:, 5] = 2.0 ** (8 + 4 * rng.random(20_000))
    mx = quantize(x, mode=mode)
    scaled = x[:, 5] / 2.0 ** (np.asarray(mx.scales)[:, 0].astype(np.float64) - 127)
    assert (scaled > 448).mean() == pytest.approx(share, abs=0.01)
    error = np.abs(np.asarray(dequantize(mx, jnp.float32)) / x - 1).max()
    assert worst * 0.99 < error <= worst  # half a step of a four-bit significand, or 512 clipped to 448


def _sqnr(got, want) -> float:
    """Signal to quantisation noise in dB."""
    return -20 * np.log10(oracle.relative_error(got, want))


@pytest.mark.parametrize("wgrad", ["dequantized", "mxfp8"])
def test_grouped_matmul_and_gradients(wgrad):
    rng = np.random.default_rng(4)
    sizes = np.array([64, 0, 96, 32], np.int32)
    lhs, grad = (rng.standard_normal((224, width)).astype(np.float32) for width in (128, 96))
    rhs = rng.standard_normal((4, 128, 96)).astype(np.float32)
    poisoned = [np.where(np.arange(224)[:, None] < 192, a, np.nan).astype(ml_dtypes.bfloat16) for a in (lhs, grad)]
    rounded = [a.astype(ml_dtypes.bfloat16) for a in (lhs, rhs, grad)]

    def run(lhs, rhs, grad, sizes):
        def product(lhs, rhs):
            return mx_grouped_matmul(lhs, quantize_weight(rhs), sizes, options=MXOptions(wgrad=wgrad))

        out, pullback = jax.vjp(product, lhs, rhs)
        return out, *pullback(grad)

    out, grad_lhs, grad_rhs = jax.jit(run)(poisoned[0], rounded[1], poisoned[1], sizes)
    want = oracle.gmm(rounded[0], rounded[1], sizes)
    want_lhs = oracle.gmm(rounded[2], rounded[1].swapaxes(1, 2), sizes)
    want_rhs = oracle.wgrad(rounded[0], rounded[2], sizes)
    assert oracle.worst_row_group(out, want, sizes) < 5e-2
    assert _sqnr(out, want) >= 27
    assert oracle.worst_row_group(grad_lhs, want_lhs, sizes) < 5e-2
    assert _sqnr(grad_lhs, want_lhs) >= 25
    assert oracle.worst_weight_group(grad_rhs, want_rhs, sizes) < 5e-2
    assert _sqnr(grad_rhs, want_rhs) >= 24
    # exact emulation: against the same quantised operands in float64 only bfloat16's rounding of results is left
    q_lhs, q_rhs = (np.asarray(dequantize(quantize(a, axis=axis))) for a, axis in ((rounded[0], 1), (rounded[1], 1)))
    assert oracle.worst_row_group(out, oracle.gmm(q_lhs, q_rhs, sizes), sizes) < 4e-3


def test_misaligned_groups_poison_an_mxfp8_weight_gradient():
    lhs, rhs = jnp.ones((64, 32), jnp.bfloat16), jnp.ones((2, 32, 32), jnp.bfloat16)

    @jax.jit
    @jax.grad
    def gradient(rhs, sizes):
        options = MXOptions(wgrad="mxfp8")
        return mx_grouped_matmul(lhs, quantize_weight(rhs), sizes, options=options).sum().astype(jnp.float32)

    assert np.isnan(np.asarray(gradient(rhs, jnp.array([31, 33])), np.float32)).all()
    assert np.isfinite(np.asarray(gradient(rhs, jnp.array([32, 32])), np.float32)).all()


def test_sink_takes_the_gradient_of_cached_weights():
    rng = np.random.default_rng(5)
    sizes = jnp.array([40, 24], jnp.int32)
    lhs = jnp.asarray(rng.standard_normal((64, 64)), jnp.bfloat16)
    rhs = jnp.asarray(rng.standard_normal((2, 64, 32)), jnp.bfloat16)
    _, cached = split_constants({"w": jax.jit(quantize_weight)(rhs)})

    def loss(sink):
        return jnp.sum(mx_grouped_matmul(lhs, merge({"w": sink}, cached)["w"], sizes).astype(jnp.float32) ** 2)

    got = jax.jit(jax.grad(loss))(jnp.zeros(rhs.shape, jnp.float32))
    want = jax.grad(lambda w: jnp.sum(grouped_matmul(lhs, w, sizes).astype(jnp.float32) ** 2))(rhs)
    assert got.dtype == jnp.float32
    assert oracle.relative_error(got, np.asarray(want).astype(np.float64)) < 6e-2


def test_same_in_a_checked_shard_map_with_replicated_weights():
    """Rows differ between devices, cached weights do not; their gradient is the sum."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(6)
    lhs = jnp.asarray(rng.standard_normal((64, 32)), jnp.bfloat16)
    rhs = jnp.asarray(rng.standard_normal((2, 32, 32)), jnp.bfloat16)
    sizes = jnp.array([[20, 12], [0, 30]], jnp.int32)
    _, cached = split_constants(quantize_weight(rhs))

    def loss(sink, cached, lhs, sizes):
        product = jax.checkpoint(mx_grouped_matmul)(lhs, merge(sink, cached), sizes)
        return jnp.sum(product.astype(jnp.float32) ** 2)

    def device(sink, cached, lhs, sizes):
        value, grad = jax.value_and_grad(loss)(sink, cached, lhs, sizes[0])
        return jax.lax.psum(value, "data"), grad

    specs = (P(), P(), P("data"), P("data"))
    step = jax.jit(jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True))
    value, grad = step(jnp.zeros(rhs.shape), cached, lhs, sizes)
    one = jax.jit(jax.value_and_grad(loss))
    each = [one(jnp.zeros(rhs.shape), cached, lhs[i * 32 :][:32], sizes[i]) for i in range(2)]
    assert oracle.relative_error(value, np.float64(each[0][0] + each[1][0])) < 1e-6
    assert oracle.relative_error(grad, np.asarray(each[0][1] + each[1][1], np.float64)) < 1e-6
