"""Per-device functions against NumPy in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.nn import attention as attention_module
from moejax.nn import cross_entropy as cross_entropy_module
from moejax.nn.attention import attention
from moejax.nn.basic import rms_norm, rotary, swiglu
from moejax.nn.cross_entropy import cross_entropy


def temporary_bytes(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def numpy_attention(q, k, v, segments, window):
    batch, length, heads, width = q.shape
    out = np.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            g = h * k.shape[2] // heads
            for i in range(length):
                low = 0 if window is None else max(0, i - window + 1)
                seen = [j for j in range(low, i + 1) if segments[b, j] == segments[b, i]]
                scores = k[b, seen, g] @ q[b, i, h] / np.sqrt(width)
                probs = np.exp(scores - scores.max())
                out[b, i, h] = probs @ v[b, seen, g] / probs.sum()
    return out


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("block", [11, 64])
def test_attention(monkeypatch, window, block):
    monkeypatch.setattr(attention_module, "QUERY_BLOCK", block)  # 21 tokens: two blocks, the last not full; or one
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, 21, 4, 6)), rng.normal(size=(2, 21, 2, 6)), rng.normal(size=(2, 21, 2, 6))
    segments = np.sort(rng.integers(1, 4, (2, 21)), axis=1).astype(np.int32)
    arrays = [jnp.asarray(a, jnp.float32) for a in (q, k, v)]

    def mine(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v, jnp.asarray(segments), window)

    got = mine(arrays[0], arrays[1], arrays[2])
    np.testing.assert_allclose(got, numpy_attention(q, k, v, segments, window), atol=2e-6)

    probe = rng.normal(size=q.shape)
    grads = jax.grad(lambda *a: jnp.sum(mine(*a) * jnp.asarray(probe, jnp.float32)), (0, 1, 2))(*arrays)
    for i, (array, grad) in enumerate(zip((q, k, v), grads, strict=True)):
        direction = rng.normal(size=array.shape)
        moved = [[a + s * 1e-5 * direction if i == j else a for j, a in enumerate((q, k, v))] for s in (1, -1)]
        plus, minus = (np.sum(numpy_attention(m[0], m[1], m[2], segments, window) * probe) for m in moved)
        np.testing.assert_allclose(np.sum(np.asarray(grad) * direction), (plus - minus) / 2e-5, rtol=1e-4, atol=1e-4)


def test_attention_is_causal_and_keeps_documents_apart():
    """Gradient of one output with respect to all inputs is zero where nothing may be seen."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 12, 2, 4)), jnp.float32) for _ in range(3))
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3]], jnp.int32)
    grad = jax.grad(lambda v: attention(q, k, v, segments, 3)[0, 6].sum())(v)
    seen = np.abs(np.asarray(grad)).sum((0, 2, 3)) > 0
    assert seen.tolist() == [False] * 4 + [True] * 3 + [False] * 5


def test_attention_holds_no_square_of_scores():
    """Memory of forward and backward grows with the length, not with its square."""

    def temporary(length: int) -> int:
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
        f = jax.jit(jax.grad(lambda q, k, v, s: attention(q, k, v, s, None).sum(), (0, 1, 2)))
        return temporary_bytes(f.lower(x, x, x, segments).compile())

    assert temporary(4096) < 3 * temporary(2048)
    assert temporary(4096) < 2 * 4096 * 4096 * 4  # the scores of two heads, once


def test_rotary_turns_pairs_and_depends_on_distance_alone():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(1, 5, 1, 8))
    positions = np.array([[0, 1, 2, 7, 30]])
    got = np.asarray(rotary(jnp.asarray(x, jnp.float32), jnp.asarray(positions), 100.0))
    z = x[..., :4] + 1j * x[..., 4:]
    z = z * np.exp(1j * positions[..., None, None] * 100.0 ** (-np.arange(4) / 4))
    np.testing.assert_allclose(got, np.concatenate([z.real, z.imag], -1), atol=2e-6)


def test_rms_norm_and_swiglu():
    rng = np.random.default_rng(3)
    x, scale = rng.normal(size=(3, 7)), rng.normal(size=7)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * scale
    np.testing.assert_allclose(
        rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32), 1e-3), want, rtol=1e-5
    )
    gate_up, down = rng.normal(size=(7, 2, 5)), rng.normal(size=(5, 7))
    gate, up = x @ gate_up[:, 0], x @ gate_up[:, 1]
    got = swiglu(*(jnp.asarray(a, jnp.float32) for a in (x, gate_up, down)))
    np.testing.assert_allclose(got, (gate / (1 + np.exp(-gate)) * up) @ down, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 37, 64])
def test_cross_entropy(monkeypatch, tokens):
    monkeypatch.setattr(cross_entropy_module, "CHUNK", 16)
    rng = np.random.default_rng(tokens)
    x, head = rng.normal(size=(tokens, 6)), rng.normal(size=(6, 11))
    target, valid = rng.integers(0, 11, tokens), rng.random(tokens) < 0.7
    valid[0] = True
    x[~valid] = np.nan  # padding may hold anything
    logits = x[valid] @ head
    lse = np.log(np.exp(logits).sum(-1))
    want = (lse - logits[np.arange(valid.sum()), target[valid]]).sum()
    dlogits = np.exp(logits - lse[:, None])
    dlogits[np.arange(valid.sum()), target[valid]] -= 1
    dx = np.zeros_like(x)
    dx[valid] = dlogits @ head.T

    args = (jnp.asarray(x, jnp.float32), jnp.asarray(head, jnp.float32))
    rest = (jnp.asarray(target, jnp.int32), jnp.asarray(valid))
    np.testing.assert_allclose(cross_entropy(*args, *rest), want, rtol=1e-5)
    value, (got_dx, got_dhead) = jax.value_and_grad(lambda x, h: 3 * cross_entropy(x, h, *rest), (0, 1))(*args)
    np.testing.assert_allclose(value, 3 * want, rtol=1e-5)
    np.testing.assert_allclose(got_dx, 3 * dx, atol=1e-5)
    np.testing.assert_allclose(got_dhead, 3 * x[valid].T @ dlogits, rtol=1e-4, atol=1e-4)


def test_cross_entropy_memory_does_not_hold_logits():
    x, head = jax.ShapeDtypeStruct((16384, 16), jnp.bfloat16), jax.ShapeDtypeStruct((16, 1000), jnp.bfloat16)
    rest = (jax.ShapeDtypeStruct((16384,), jnp.int32), jax.ShapeDtypeStruct((16384,), jnp.bool_))
    compiled = jax.jit(jax.grad(cross_entropy, (0, 1))).lower(x, head, *rest).compile()
    assert temporary_bytes(compiled) < 16384 * 1000 * 4 / 2
