"""Checks every GPU kernel, compiled for this machine, against NumPy float64. Exit code 1 if one is wrong.

    python benchmarks/kernel_gpu_numerics.py [RESULT.json]

Bounds are those of the test suite, on the worst group. Each result is computed three times: one that moves is a
race. Rows past the sum hold NaN in the operands and in the incoming gradient.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import jax
import kernels_oracle as oracle
import numpy as np

from moejax.kernels import Backends, Kernel, Tiles, dispatch, expert_ffn, grouped_matmul, target
from moejax.kernels.table import choose_all
from moejax.nn.activations import ACTIVATIONS

TOLERANCE = {"bfloat16": 4e-3, "float32": 1e-6}  # the order of the checks: what training uses first
SHAPES = [(1000, 384, 320, 7), (900, 200, 136, 1), (1200, 128, 256, 257)]
MOSAIC_SHAPES = [(1000, 384, 256, 7), (900, 256, 128, 1), (1200, 128, 256, 257)]  # K and N are multiples of tiles
WAYS = {
    "table": None,
    "tiles 64x128x64": Kernel("gpu", Tiles(64, 128, 64, 4, 3)),
    "reverse": Kernel("gpu", Tiles(64, 64, 32, 4, 3), reverse=True),
    "mosaic": Kernel("mosaic"),
}
FFN: str | Kernel = "gpu"  # the kernel of the expert FFN


def shapes(way: str, dtype: str) -> list[tuple[int, int, int, int]]:
    """What a way is checked on. Mosaic kernels are for Hopper and multiply bfloat16 alone."""
    if way != "mosaic":
        return SHAPES
    hopper = getattr(jax.devices()[0], "compute_capability", "").startswith("9.")
    return MOSAIC_SHAPES if hopper and dtype == "bfloat16" else []


def worst_errors(way: str, shape: tuple[int, int, int, int], dtype: str) -> dict[str, float]:
    """Largest error over all group patterns, by direction. Raises AssertionError for tails or repeats that differ."""
    m, k, n, groups = shape
    rng = np.random.default_rng(3)
    sizes_of = ((m, k), (groups, k, n), (m, n), (groups, k, n))
    lhs, rhs, grad, old = (oracle.round_to(rng.standard_normal(s), dtype) for s in sizes_of)
    old = old.astype(np.float32)
    kernel = WAYS[way]
    backends = choose_all(dtype, m, groups, None) if kernel is None else Backends.all(kernel)

    @jax.jit
    def run(lhs, rhs, sizes, grad, old):
        out, pullback = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes, backend=backends), lhs, rhs)
        return out, *pullback(grad), dispatch.wgrad(lhs, grad, sizes, kernel=backends.wgrad, accumulator=old)

    worst = dict.fromkeys(("forward", "dgrad", "wgrad", "wgrad into float32"), 0.0)
    for name, sizes in oracle.patterns(m, groups, 64).items():
        live = int(sizes.sum())
        x, dy = lhs.copy(), grad.copy()
        x[live:], dy[live:] = np.nan, np.nan
        runs = [[np.asarray(a) for a in run(x, rhs, sizes, dy, old)] for _ in range(3)]
        for again in runs[1:]:
            for a, b in zip(runs[0], again, strict=True):
                assert a.tobytes() == b.tobytes(), f"{way} {shape} {dtype} {name}: results move: a race"
        out, grad_lhs, grad_rhs, total = runs[0]
        weight = oracle.wgrad(lhs, grad, sizes)
        errors = (
            oracle.worst_row_group(out, oracle.gmm(lhs, rhs, sizes), sizes),
            oracle.worst_row_group(grad_lhs, oracle.gmm(grad, rhs.swapaxes(1, 2), sizes), sizes),
            oracle.worst_weight_group(grad_rhs, weight, sizes),
            max(map(oracle.relative_error, total, weight + old)),
        )
        worst = {key: max(value, error) for (key, value), error in zip(worst.items(), errors, strict=True)}
    return worst


def ffn_errors(dtype: str) -> dict[str, float]:
    """Errors of the expert FFN's fused kernels: gathered rows, SwiGLU, route weights, and every gradient."""
    rng = np.random.default_rng(5)
    tokens, m, d, f, groups, live = 300, 900, 256, 192, 7, 800
    shapes = (tokens, d), (groups, d, 2, f), (groups, f, d), (m, d)
    x, up, down, grad = (
        oracle.round_to(rng.standard_normal(s) / np.sqrt(s[1] if len(s) > 2 else 1), dtype) for s in shapes
    )
    scale, index = rng.standard_normal(m).astype(np.float32), rng.integers(0, tokens, m).astype(np.int32)
    sizes = rng.multinomial(live, np.full(groups, 1 / groups)).astype(np.int32)

    @jax.jit
    def run(x, up, down, scale, grad):
        def ffn(x, up, down, scale):
            return expert_ffn(x, up, down, sizes, scale, index, activation=ACTIVATIONS["swiglu"], backend=FFN)

        out, pullback = jax.vjp(ffn, x, up, down, scale)
        return out, *pullback(grad)

    poison = np.where(np.arange(m) < live, np.float32(0), np.float32(np.nan))
    got = run(x, up, down, scale + poison, (grad + poison[:, None]).astype(grad.dtype))
    merged = up.reshape(groups, d, -1)
    gate, above = np.split(oracle.gmm(x[index], merged, sizes), 2, axis=1)
    sigmoid = 1 / (1 + np.exp(-gate))
    hidden = gate * sigmoid * above
    d_hidden = oracle.gmm(grad, down.swapaxes(1, 2), sizes)
    slope = above * sigmoid * (1 + gate * (1 - sigmoid))
    d_pre = np.concatenate([slope, gate * sigmoid], axis=1) * np.tile(d_hidden * scale[:, None], 2)
    d_x = np.zeros((tokens, d))
    np.add.at(d_x, index, oracle.gmm(d_pre, merged.swapaxes(1, 2), sizes))
    weighted = hidden * scale[:, None]
    return {
        "forward": oracle.worst_row_group(got[0], oracle.gmm(weighted, down, sizes), sizes),
        "dgrad": oracle.relative_error(got[1], d_x),
        "wgrad of up": oracle.worst_weight_group(
            got[2].reshape(merged.shape), oracle.wgrad(x[index], d_pre, sizes), sizes
        ),
        "wgrad of down": oracle.worst_weight_group(got[3], oracle.wgrad(weighted, grad, sizes), sizes),
        "scale": oracle.relative_error(got[4], (d_hidden * hidden).sum(1)),
    }


def main() -> int:
    """Run everything, print a line each, write JSON; return the exit code."""
    failed, results = 0, {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "checks": []}
    for dtype, bound in TOLERANCE.items():
        checks = [
            (f"{way} {shape}", lambda w=way, s=shape, d=dtype: worst_errors(w, s, d))
            for way in WAYS
            for shape in shapes(way, dtype)
        ]
        checks.insert(1, ("expert ffn", lambda d=dtype: ffn_errors(d)))
        for name, check in checks:
            start = time.perf_counter()
            try:
                errors, note = check(), ""
            except Exception as error:
                errors, note = {}, f"{type(error).__name__}: {str(error)[:500]}"
            allowed = 2 * bound if name == "expert ffn" else bound  # it rounds to the type on its way
            bounds = {key: 1e-6 if key == "wgrad into float32" else allowed for key in errors}
            good = not note and all(value <= bounds[key] for key, value in errors.items())
            failed += not good
            seconds = time.perf_counter() - start
            print("ok  " if good else "FAIL", dtype, name, errors, note, f"{seconds:.1f} s", flush=True)
            results["checks"].append({"dtype": dtype, "name": name, "good": good, "errors": errors, "note": note})
            if len(sys.argv) > 1:  # after every check: time may run out
                Path(sys.argv[1]).write_text(json.dumps(results, indent=1))
    return int(failed > 0)


if __name__ == "__main__":
    with target("gpu", jax.devices()[0].device_kind):
        sys.exit(main())
