"""Times one layer of a 1.6B-active model on this machine: its experts, and a training step of the whole layer.

    python benchmarks/kernel_layer_step.py [RESULT.json] [--small]

D 2048, 64 experts of width 1024, 8 per token, 16,384 tokens. Experts, forward and backward: rows are gathered by
routing that is random and skewed, pass gate and up, SwiGLU with the route weight, down, and are summed per token;
kernels composed, fused with the activation, and a dense FFN of equal FLOPs. `training step`: attention and the
trainer's MoE layer (router, dispatch, experts, combine) with a squared error, its gradients, and Adam in float32.

A way that fails leaves the others alone; the result is written after every one.
"""

import functools
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from moejax.axes import EXPERT
from moejax.config import Config, DataConfig, MeshConfig, ModelConfig, MoEModelConfig
from moejax.kernels import expert_ffn, grouped_matmul
from moejax.moe.exchange import make_exchange
from moejax.moe.experts import ExpertWeights
from moejax.moe.layer import moe_layer
from moejax.moe.router import RouterWeights
from moejax.nn.activations import ACTIVATIONS
from moejax.nn.basic import rms_norm
from moejax.sharding import make_mesh

TOKENS, LENGTH, WIDTH, HIDDEN, EXPERTS, TOP_K, HEADS, DTYPE = 16384, 4096, 2048, 1024, 64, 8, 16, jnp.bfloat16
if "--small" in sys.argv:
    TOKENS, LENGTH, WIDTH, HIDDEN, EXPERTS, HEADS = 256, 64, 64, 32, 8, 2
ROUNDS = 10


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


def normal(*shape: int) -> jax.Array:
    """Random numbers of variance 1 / rows, made on the device."""
    return jax.random.normal(jax.random.key(sum(shape)), shape, DTYPE) * jnp.asarray(shape[-2] ** -0.5, DTYPE)


def experts_alone(function):
    """One call of the experts' forward and backward, and its FLOPs."""
    index, sizes = map(jnp.asarray, routing())
    x, gate_up, down = normal(TOKENS, WIDTH), normal(EXPERTS, WIDTH, 2 * HIDDEN), normal(EXPERTS, HIDDEN, WIDTH)
    scale = jax.random.uniform(jax.random.key(1), index.shape)

    @jax.jit
    def step(index, sizes, *args):
        out, pullback = jax.vjp(lambda *a: function(*a, index, sizes), *args)
        return out, *pullback(out)

    return lambda: step(index, sizes, x, gate_up, down, scale), 18 * index.shape[0] * WIDTH * HIDDEN


@jax.checkpoint
def _attention(x_SD, qkv_D3HA, out_HAD):
    q, k, v = jnp.einsum("sd,dxha->xsha", x_SD, qkv_D3HA)
    return jnp.einsum("sha,had->sd", jax.nn.dot_product_attention(q, k, v, is_causal=True), out_HAD)


def _loss(weights, x_BSD, target_BSD, config: Config):
    """Squared error of attention and MoE, with a residual around each, over the tokens; weights in `DTYPE`."""
    attend = functools.partial(_attention, qkv_D3HA=weights["qkv"], out_HAD=weights["out"])
    x_BSD = x_BSD + jax.lax.map(lambda x_SD: attend(rms_norm(x_SD, weights["norms"][0], 1e-6)), x_BSD)
    normed = rms_norm(x_BSD, weights["norms"][1], 1e-6)
    experts = ExpertWeights(weights["gate_up"], weights["down"])
    router, valid = RouterWeights(weights["router"]), jnp.ones(x_BSD.shape[:2], bool)
    y_BSD, _ = moe_layer(normed, normed, valid, router, experts, config, make_exchange(config))
    return jnp.sum(jnp.square((x_BSD + y_BSD - target_BSD).astype(jnp.float32))) / target_BSD.size


def training_step():
    """One call of a training step, and the FLOPs of its matmuls; parameters and moments stay on the device."""
    model = MoEModelConfig(num_experts=EXPERTS, top_k=TOP_K, expert_dim=HIDDEN)
    config = Config(mesh=MeshConfig(), model=ModelConfig(d_model=WIDTH, moe=model), data=DataConfig(batch_size=1))
    shapes = {
        "qkv": (WIDTH, 3, HEADS, WIDTH // HEADS),
        "out": (HEADS, WIDTH // HEADS, WIDTH),
        "norms": (2, WIDTH),
        "router": (WIDTH, EXPERTS),
        "gate_up": (EXPERTS, WIDTH, 2, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
    }
    split, one = PartitionSpec(EXPERT), PartitionSpec()
    specs = {name: split if name in ("gate_up", "down") else one for name in shapes}

    def gradients(params, x, target):
        def loss(params):
            plain = {name: a if name in ("router", "norms") else a.astype(DTYPE) for name, a in params.items()}
            return _loss(plain, x, target, config)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.lax.psum(value, EXPERT), grads

    mapped = jax.shard_map(
        gradients,
        mesh=make_mesh(config.mesh, jax.devices()[:1]),
        in_specs=(specs, split, split),
        out_specs=(one, specs),
        check_vma=True,
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x, target):
        params, mean, square = state
        loss, grads = mapped(params, x, target)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
        square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, square, grads)
        params = jax.tree.map(lambda p, m, s: p - 1e-4 * m / (jnp.sqrt(s) + 1e-8), params, mean, square)
        return (params, mean, square), loss

    params = {name: normal(*shape).astype(jnp.float32) * shape[-2] ** 0.5 * 0.02 for name, shape in shapes.items()}
    params["norms"] = jnp.ones(shapes["norms"])
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    held = [(params, zeros(params), zeros(params))]
    x, target = (normal(TOKENS // LENGTH, LENGTH, WIDTH) * jnp.asarray(f, DTYPE) for f in (LENGTH**0.5, 1))

    def call():
        held[0], loss = step(held[0], x, target)
        return loss

    per_token = 18 * TOP_K * WIDTH * HIDDEN + 24 * WIDTH * WIDTH + 6 * EXPERTS * WIDTH + 6 * LENGTH * WIDTH
    return call, TOKENS * per_token


def main() -> int:
    """Time, print and write; return the exit code, 1 if a way failed."""
    ways = {function.__name__: functools.partial(experts_alone, function) for function in (composed, fused, dense)}
    ways["training step"] = training_step
    sizes = routing()[1]
    results = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    results["load max over mean"] = float(sizes.max() / sizes.mean())
    failed = 0
    for name, make in ways.items():
        try:
            call, flops = make()
            first, times = jax.block_until_ready(call()), []
            for _ in range(ROUNDS + 1):
                start = time.perf_counter()
                last = jax.block_until_ready(call())
                times.append(time.perf_counter() - start)
            seconds = statistics.median(times[1:])
            results[name] = {"ms": seconds * 1e3, "tflops": flops / seconds / 1e12}
            print(f"{name}: {seconds * 1e3:.2f} ms, {flops / seconds / 1e12:.1f} TFLOP/s", flush=True)
            if name == "training step":
                results[name] |= {"first loss": float(first), "last loss": float(last)}
                assert float(last) < float(first), f"the loss does not fall: {float(first)} to {float(last)}"
            del call, first, last
        except Exception as error:
            failed += 1
            results[name] = {**results.get(name, {}), "error": f"{type(error).__name__}: {str(error)[:500]}"}
            print(f"{name}: FAIL {results[name]['error']}", flush=True)
        paths = [a for a in sys.argv[1:] if not a.startswith("--")]
        if paths:
            Path(paths[0]).write_text(json.dumps(results, indent=1))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
