"""Attention over sharded sequences against the whole sequence in NumPy float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from moejax.nn.context_attention import context_attention

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


def arrays(length: int, heads: int, kv_heads: int, batch: int = 2, width: int = 6, seed: int = 0) -> tuple[Any, ...]:
    """q, k, v, gradient of the output; documents of every length, row 0 half padding, row 1 one document."""
    rng = np.random.default_rng(seed)
    shapes = [(batch, length, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    segments = np.sort(rng.integers(1, 4, (batch, length)), axis=1).astype(np.int32)
    segments[0, length // 2 - 1 :] = 0
    segments[1] = 1
    return *(rng.normal(size=shape) for shape in shapes), segments


def sharded(kind: str, size: int, window: int | None, data: int = 1) -> Any:
    """Outputs and gradients as one function of q, k, v, dout and segments on `data` x `size` devices."""
    mesh = Mesh(
        np.array(jax.devices()[: data * size]).reshape(data, size), ("data", "context"), axis_types=(AxisType.Auto,) * 2
    )

    def both(q: Any, k: Any, v: Any, dout: Any, segments: Any) -> tuple[Any, ...]:
        attend = partial(context_attention, segments_Bs=segments, window=window, axis="context", size=size, kind=kind)  # type: ignore[arg-type]
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    return jax.jit(jax.shard_map(both, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=True))


def check(kind: str, size: int, length: int, heads: int, kv_heads: int, window: int | None, data: int = 1) -> None:
    *floats, segments = arrays(length, heads, kv_heads)
    got = sharded(kind, size, window, data)(*(jnp.asarray(a, jnp.float32) for a in floats), segments)
    want = numpy_attention(*floats[:3], segments, window, floats[3])
    for name, g, w in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        g = np.asarray(g)
        assert np.isfinite(g).all(), name
        np.testing.assert_allclose(g, w, atol=1e-5 * np.abs(w).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "size", "length", "heads", "kv_heads", "window"),
    [
        ("ulysses", 2, 14, 4, 2, None),
        ("ulysses", 4, 20, 8, 4, 7),
        ("ring", 2, 14, 4, 2, None),
        ("ring", 4, 20, 4, 1, 7),
        ("ring", 8, 40, 2, 2, None),
    ],
)
def test_equals_the_whole_sequence(kind, size, length, heads, kv_heads, window):
    check(kind, size, length, heads, kv_heads, window)
