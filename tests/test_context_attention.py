"""Attention over sharded sequences against the whole sequence in NumPy float64."""

import collections
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from moejax.nn import attention as attention_module
from moejax.nn.context_attention import context_attention
from moejax.nn.ring_attention import Ring
from moejax.plan.hlo import collectives
from moejax.varying import vary

SPEC = PartitionSpec("data", "context")


def numpy_attention(q: Any, k: Any, v: Any, segments: Any, window: int | None, dout: Any) -> tuple[Any, ...]:
    """Outputs of attention, and the gradients of sum(out * dout), from the textbook formulas."""
    batch, length, heads, width = q.shape
    group = heads // k.shape[2]
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    near = (distance >= 0) & (distance < (window or length))
    out, dq, dk, dv = (np.zeros_like(a) for a in (q, q, k, v))
    for b, h in np.ndindex(batch, heads):
        mask = near & (segments[b][:, None] == segments[b][None, :])
        g, scale = h // group, width**-0.5
        scores = np.where(mask, q[b, :, h] @ k[b, :, g].T * scale, -np.inf)
        probs = np.exp(scores - scores.max(1, keepdims=True))
        probs /= probs.sum(1, keepdims=True)
        out[b, :, h] = probs @ v[b, :, g]
        dv[b, :, g] += probs.T @ dout[b, :, h]
        dprobs = dout[b, :, h] @ v[b, :, g].T
        dscores = probs * (dprobs - (dprobs * probs).sum(1, keepdims=True)) * scale
        dq[b, :, h] += dscores @ k[b, :, g]
        dk[b, :, g] += dscores.T @ q[b, :, h]
    return out, dq, dk, dv


def arrays(length: int, heads: int, kv_heads: int, width: int = 6) -> tuple[Any, ...]:
    """q, k, v, the output's gradient, documents: of any length, half of a row or a whole row padding, one document."""
    rng = np.random.default_rng(0)
    shapes = [(4, length, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    segments = np.sort(rng.integers(1, 4, (4, length)), axis=1).astype(np.int32)
    segments[1, length // 2 - 1 :] = 0
    segments[2] = 0
    segments[3] = 1
    return *(rng.normal(size=shape) for shape in shapes), segments


def mesh_of(data: int, size: int) -> Mesh:
    devices = np.array(jax.devices()[: data * size]).reshape(data, size)
    return Mesh(devices, ("data", "context"), axis_types=(AxisType.Auto,) * 2)


def sharded(kind: str, size: int, window: int | None, data: int = 1) -> Any:
    """Outputs and gradients as one function of q, k, v, the output's gradient and documents on data x size devices."""

    def both(q: Any, k: Any, v: Any, dout: Any, segments: Any) -> tuple[Any, ...]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return context_attention(q, k, v, segments, window, "context", size, kind)  # type: ignore[arg-type]

        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    return jax.jit(jax.shard_map(both, mesh=mesh_of(data, size), in_specs=SPEC, out_specs=SPEC, check_vma=True))


def check(kind: str, size: int, length: int, heads: int, kv_heads: int, window: int | None) -> None:
    *floats, segments = arrays(length, heads, kv_heads)
    got = sharded(kind, size, window, min(2, 8 // size))(*(jnp.asarray(a, jnp.float32) for a in floats), segments)
    q, k, v, dout = floats
    want = numpy_attention(q, k, v, segments, window, dout)
    for name, g, w in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        g = np.asarray(g)
        assert np.isfinite(g).all(), name
        scale = max(np.abs(w).max(), 1.0)  # with window 1 scores have no gradient, and terms over one cancel
        np.testing.assert_allclose(g, w, atol=1e-5 * scale, rtol=0, err_msg=name)


# kind, size, length, heads, key-value heads, window, queries a block: shards of odd lengths, windows under, of and over
# a shard's length, all numbers of key-value heads, local lengths that are not a multiple of the block
CASES = [
    ("ulysses", 2, 14, 4, 2, None, 512),
    ("ulysses", 4, 20, 8, 4, 7, 3),
    ("ring", 2, 14, 4, 2, None, 3),
    ("ring", 4, 20, 4, 1, 7, 512),
    ("ring", 8, 40, 2, 2, None, 2),
]
PRODUCT = [
    (kind, size, 5 * size, heads, kv_heads, window, block)
    for kind, size, (heads, kv_heads), (window, block) in itertools.product(
        ("ulysses", "ring"),
        (2, 4, 8),
        ((8, 8), (16, 8), (3, 1)),
        ((None, 512), (None, 3), (1, 3), (2, 512), (5, 2), (6, 3), (7, 512), (30, 4)),
    )
    if kind == "ring" or kv_heads % size == 0
]


@pytest.mark.parametrize(("kind", "size", "length", "heads", "kv_heads", "window", "block"), CASES)
def test_equals_the_whole_sequence(monkeypatch, kind, size, length, heads, kv_heads, window, block):
    monkeypatch.setattr(attention_module, "QUERY_BLOCK", block)
    check(kind, size, length, heads, kv_heads, window)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size", "length", "heads", "kv_heads", "window", "block"), PRODUCT)
def test_equals_the_whole_sequence_whole_product(monkeypatch, kind, size, length, heads, kv_heads, window, block):
    monkeypatch.setattr(attention_module, "QUERY_BLOCK", block)
    check(kind, size, length, heads, kv_heads, window)


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_bfloat16_is_as_exact_as_on_one_device(kind):
    *floats, segments = arrays(48, 4, 4, width=16)
    rounded = [jnp.asarray(a, jnp.bfloat16) for a in floats]
    q, k, v, dout = (np.asarray(a, np.float64) for a in rounded)
    want = numpy_attention(q, k, v, segments, None, dout)
    with jax.numpy_dtype_promotion("standard"):  # as JAX's attention wants it
        got, alone = (sharded(kind, size, None)(*rounded, segments) for size in (4, 1))
    for name, g, one, w in zip(("out", "dq", "dk", "dv"), got, alone, want, strict=True):
        assert g.dtype == jnp.bfloat16
        errors = [np.sqrt(np.mean(np.square(np.asarray(a, np.float64) - w))) for a in (g, one)]
        assert errors[0] < 1.5 * errors[1] < 0.02 * np.sqrt(np.mean(np.square(w))), (name, errors)


def test_ring_goes_as_far_as_the_window_reaches():
    blocks = [Ring("context", 8, window).blocks(10) for window in (None, 1, 2, 11, 12, 21, 22, 1000)]
    assert blocks == [8, 1, 2, 2, 3, 3, 4, 8]  # the first token of a shard sees window - 1 tokens before it


LAYERS = 2


def compiled(kind: str, size: int, length: int, window: int | None = None, policy: Any = None) -> Any:
    """Forward and backward of layers of attention, in a loop, recomputed by a policy."""
    heads, kv_heads, width = 8, 8, 16

    def layer(x_BsD: jax.Array, w: jax.Array, segments: jax.Array) -> jax.Array:
        qkv = (x_BsD @ w).reshape(*x_BsD.shape[:2], -1, width)
        q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=2)
        y = context_attention(q, k, v, segments, window, "context", size, kind)  # type: ignore[arg-type]
        return jnp.sin(y).reshape(*x_BsD.shape[:2], heads * width)[..., : x_BsD.shape[2]]  # its gradient needs y

    def loss(x: jax.Array, w: jax.Array, segments: jax.Array) -> jax.Array:
        one = layer if policy is None else jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return jnp.sum(jax.lax.scan(lambda x, w: (one(x, w, segments), None), x, w)[0])

    def both(x: jax.Array, w: jax.Array, segments: jax.Array) -> Any:
        return jax.grad(loss, (0, 1))(x, vary(w, ("data", "context")), segments)[0]

    one = PartitionSpec()
    f = jax.shard_map(both, mesh=mesh_of(1, size), in_specs=(SPEC, one, SPEC), out_specs=SPEC, check_vma=True)
    x = jax.ShapeDtypeStruct((2, length, 32), jnp.float32)
    w = jax.ShapeDtypeStruct((LAYERS, 32, (heads + 2 * kv_heads) * width), jnp.float32)
    return jax.jit(f).lower(x, w, jax.ShapeDtypeStruct((2, length), jnp.int32)).compile()


SAVE = jax.checkpoint_policies.save_only_these_names("exchange", "attention")
NOTHING = jax.checkpoint_policies.nothing_saveable
ROW = 2 * 6 * 16 * 4  # bytes of one head of the local tokens: 2 sequences, 6 tokens, width 16, float32


@pytest.mark.parametrize(
    ("kind", "window", "policy", "want"),
    [
        # queries, keys and values; outputs; and back
        pytest.param(
            *("ulysses", None, None, {"all-to-all": [24 * ROW, 8 * ROW, 8 * ROW, 24 * ROW]}), marks=pytest.mark.slow
        ),
        ("ulysses", None, SAVE, {"all-to-all": [24 * ROW, 8 * ROW, 8 * ROW, 24 * ROW]}),
        ("ulysses", None, NOTHING, {"all-to-all": 2 * [24 * ROW, 8 * ROW] + [8 * ROW, 24 * ROW]}),
        # keys and values 3 times forward and 3 times backward, their gradients 4 times
        pytest.param(*("ring", None, None, {"collective-permute": 10 * [16 * ROW]}), marks=pytest.mark.slow),
        ("ring", None, SAVE, {"collective-permute": 10 * [16 * ROW]}),
        ("ring", None, NOTHING, {"collective-permute": 13 * [16 * ROW]}),
        ("ring", 8, None, {"collective-permute": 7 * [16 * ROW]}),
    ],
)
def test_what_crosses(kind, window, policy, want):
    found = collections.defaultdict(list)
    for item in collectives(compiled(kind, 4, 24, window, policy).as_text()):
        found[item.kind, item.dtype] += item.times * [item.bytes // item.times]
    assert found.pop(("all-gather", "s32")) == [2 * 24 * 4]  # documents: no layer changes them
    assert {kind: sorted(sizes) for (kind, _), sizes in found.items()} == {
        k: sorted(LAYERS * v) for k, v in want.items()
    }


def temporary(kind: str, size: int, length: int) -> int:
    """Bytes of a device's temporaries, forward and backward."""
    return compiled(kind, size, length).memory_analysis().temp_size_in_bytes


def test_ring_holds_one_block_of_scores():
    """Of one step and one block of queries, however many shards and layers there are."""
    rows = 2 * 8 * 1024 * 8192 * 4  # a device's rows of scores, in one layer
    eight = temporary("ring", 8, 8192)
    assert eight < rows / 2
    assert eight < 1.1 * temporary("ring", 2, 2048)  # the same local length
    assert temporary("ring", 8, 16384) < 2.2 * eight  # 16 times the scores
