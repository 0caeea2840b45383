"""The grouped matmul inside a checked shard_map, under scan and recomputation, against float64."""

import functools

import jax
import jax.numpy as jnp
import kernels_oracle as oracle
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.kernels import Kernel, dispatch, grouped_matmul, vary_like

LAYERS, ROWS, WIDTH, HIDDEN, GROUPS = 2, 40, 12, 20, 6  # rows per device; groups over two devices


def _layer(backend, x, w1, w2, sizes):
    hidden = grouped_matmul(x, w1, sizes, backend=backend)
    return grouped_matmul(jnp.tanh(hidden), w2, sizes, backend=backend, transpose_rhs=True)


def _loss(backend, x, w1, w2, sizes):
    """Two layers with their own weights; x varies over both axes, weights over `expert` only."""

    @jax.checkpoint
    def body(carry, weights):
        w1, w2 = weights
        return _layer(backend, carry, w1, w2, sizes), None

    x, _ = jax.lax.scan(body, x, (w1, w2))
    return jax.lax.psum(jnp.sum(x * x), ("data", "expert"))


def _oracle(x, w1, w2, sizes):
    """Loss and gradients of one device's rows in float64."""
    inputs, hidden = [], []
    for layer in range(LAYERS):
        inputs.append(x)
        hidden.append(np.tanh(oracle.gmm(x, w1[layer], sizes)))
        x = oracle.gmm(hidden[-1], w2[layer].swapaxes(1, 2), sizes)
    grad, g1, g2 = 2 * x, np.zeros(w1.shape), np.zeros(w2.shape)
    for layer in reversed(range(LAYERS)):
        g2[layer] = oracle.wgrad(grad, hidden[layer], sizes)
        dh = oracle.gmm(grad, w2[layer], sizes) * (1 - hidden[layer] ** 2)
        g1[layer] = oracle.wgrad(inputs[layer], dh, sizes)
        grad = oracle.gmm(dh, w1[layer].swapaxes(1, 2), sizes)
    return (x * x).sum(), grad, g1, g2


@pytest.mark.parametrize("backend", ["cpu", "xla", "padded", "reference"])
def test_gradients_in_checked_shard_map(backend):
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4 * ROWS, WIDTH)).astype(np.float32)
    w1 = rng.standard_normal((LAYERS, GROUPS, WIDTH, HIDDEN)).astype(np.float32) / 3
    w2 = rng.standard_normal((LAYERS, GROUPS, WIDTH, HIDDEN)).astype(np.float32) / 3
    sizes = np.array([[[5, 0, 30], [0, 0, 0]], [[13, 13, 14], [40, 0, 0]]], np.int32)  # data, expert, group

    specs = (P(("data", "expert")), P(None, "expert"), P(None, "expert"), P("data", "expert"))
    grad = jax.value_and_grad(functools.partial(_loss, backend), argnums=(0, 1, 2))
    step = jax.shard_map(
        lambda x, w1, w2, sizes: grad(x, w1, w2, sizes[0, 0]),
        mesh=mesh,
        in_specs=(*specs[:3], P("data", "expert", None)),
        out_specs=(P(), specs[:3]),
        check_vma=True,
    )
    loss, (gx, g1, g2) = jax.jit(step)(x, w1, w2, sizes)

    want_loss, want1, want2 = 0.0, np.zeros(w1.shape), np.zeros(w2.shape)
    for data in range(2):
        for expert in range(2):
            rows = slice((2 * data + expert) * ROWS, (2 * data + expert + 1) * ROWS)
            mine = slice(expert * GROUPS // 2, (expert + 1) * GROUPS // 2)
            part, gx_part, g1_part, g2_part = _oracle(x[rows], w1[:, mine], w2[:, mine], sizes[data, expert])
            assert oracle.relative_error(gx[rows], gx_part) < 2e-6
            want_loss, want1[:, mine], want2[:, mine] = (
                want_loss + part,
                want1[:, mine] + g1_part,
                want2[:, mine] + g2_part,
            )
    assert oracle.relative_error(loss, want_loss) < 2e-6
    assert oracle.relative_error(g1, want1) < 2e-6  # the sum over `data` comes from the cast's transpose
    assert oracle.relative_error(g2, want2) < 2e-6


@pytest.mark.parametrize("backend", ["cpu", "xla", "padded", "reference"])
def test_weight_gradients_are_added_to_an_accumulator_that_all_devices_share(backend):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(2)
    x, dy = (rng.standard_normal((2 * ROWS, width)).astype(np.float32) for width in (WIDTH, HIDDEN))
    old = rng.standard_normal((GROUPS, WIDTH, HIDDEN)).astype(np.float32)
    sizes = np.array([[5, 0, 9, 2, 3, 1], [7, 7, 7, 7, 7, 5]], np.int32)

    def device(x, dy, sizes, old):
        return dispatch.wgrad(x, dy, sizes[0], kernel=Kernel(backend), accumulator=old)[None]

    specs = P("data"), P("data"), P("data"), P()
    mapped = jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=True)
    got = jax.jit(mapped)(x, dy, sizes, old)
    for i in range(2):
        rows = slice(i * ROWS, (i + 1) * ROWS)
        assert oracle.relative_error(got[i], old + oracle.wgrad(x[rows], dy[rows], sizes[i])) < 1e-6


def test_vary_like_outside_a_manual_region_is_the_identity():
    x, y = jnp.ones(3), jnp.zeros(2)
    got_x, got_y = vary_like(x, y)
    assert got_x is x
    assert got_y is y
