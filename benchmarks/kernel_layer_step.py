"""Times forward and backward of one MoE layer's experts in the shape of a 1.6B-active model, on this machine.

    python benchmarks/kernel_layer_step.py [RESULT.json] [--small]

D 2048, 64 experts of width 1024, 8 per token, 16,384 tokens: rows are gathered by routing that is random and
skewed, pass gate and up, SwiGLU with the route weight, down, and are summed per token. Routing is not learned.
Three ways: kernels composed, fused with the activation, and a dense FFN of equal FLOPs.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from moejax.kernels import expert_ffn, grouped_matmul
from moejax.nn.activations import ACTIVATIONS

TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K, DTYPE = 16384, 2048, 1024, 64, 8, jnp.bfloat16
if "--small" in sys.argv:
    TOKENS, WIDTH, HIDDEN, EXPERTS = 256, 64, 32, 8


def routing() -> tuple[np.ndarray, np.ndarray]:
    """Token of each row, expert after expert, and rows of each expert: the top of random scores, skewed."""
    rng = np.random.default_rng(0)
    scores = rng.gumbel(size=(TOKENS, EXPERTS)) + 0.5 * rng.standard_normal(EXPERTS)
    chosen = np.argpartition(-scores, TOP_K - 1, axis=1)[:, :TOP_K]
    order = np.argsort(chosen.ravel(), kind="stable")
    return (order // TOP_K).astype(np.int32), np.bincount(chosen.ravel(), minlength=EXPERTS).astype(np.int32)


def composed(x, gate_up, down, scale, index, sizes):
    """Gather, project, activate, scale, project back, sum."""
    gate, up = jnp.split(grouped_matmul(x[index], gate_up, sizes).astype(jnp.float32), 2, axis=-1)
    hidden = (jax.nn.silu(gate) * up * scale[:, None]).astype(x.dtype)
    return jnp.zeros_like(x).at[index].add(grouped_matmul(hidden, down, sizes))


def fused(x, gate_up, down, scale, index, sizes):
    """The same with one kernel up to the hidden rows, and one from the result's gradient back to gate and up."""
    up = gate_up.reshape(*gate_up.shape[:2], 2, -1)
    out = expert_ffn(x, up, down, sizes, scale, index, activation=ACTIVATIONS["swiglu"])
    return jnp.zeros_like(x).at[index].add(out)


def dense(x, gate_up, down, scale, index, sizes):
    """Every row through the first expert, rows not gathered: the matmuls alone."""
    del sizes
    rows = jnp.tile(x, (index.shape[0] // x.shape[0], 1))
    gate, up = jnp.split((rows @ gate_up[0]).astype(jnp.float32), 2, axis=-1)
    hidden = (jax.nn.silu(gate) * up * scale[:, None]).astype(x.dtype)
    return (hidden @ down[0]).reshape(-1, *x.shape).sum(0)


def main() -> None:
    """Time and print."""
    rng = np.random.default_rng(1)
    index, sizes = routing()
    shapes = (TOKENS, WIDTH), (EXPERTS, WIDTH, 2 * HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    x, gate_up, down = (jnp.asarray(rng.standard_normal(s, np.float32) / s[-2] ** 0.5, DTYPE) for s in shapes)
    scale = jnp.asarray(rng.random(index.shape[0], np.float32))
    flops = 18 * index.shape[0] * WIDTH * HIDDEN
    ways = {}
    for function in (composed, fused, dense):

        def step(x, gate_up, down, scale, function=function):
            out, pullback = jax.vjp(
                lambda *a: function(*a, jnp.asarray(index), jnp.asarray(sizes)), x, gate_up, down, scale
            )
            return out, *pullback(out)

        ways[function.__name__] = jax.jit(step)
    results = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "load max over mean": float(sizes.max() / sizes.mean()),
    }
    times = {name: [] for name in ways}
    for attempt in range(12):
        for name, way in ways.items():
            start = time.perf_counter()
            jax.block_until_ready(way(x, gate_up, down, scale))
            if attempt >= 2:
                times[name].append(time.perf_counter() - start)
    for name, values in times.items():
        seconds = statistics.median(values)
        results[name] = {"ms": seconds * 1e3, "tflops": flops / seconds / 1e12}
        print(f"{name}: {seconds * 1e3:.2f} ms, {flops / seconds / 1e12:.1f} TFLOP/s", flush=True)
    paths = [a for a in sys.argv[1:] if not a.startswith("--")]
    if paths:
        Path(paths[0]).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
