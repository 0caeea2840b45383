"""Prints the time of an MoE layer, forward and backward, by phase, against a dense FFN of equal active FLOPs.

    python benchmarks/moe_layer.py [--exchange padded,ragged,gather] [--ranks 8] [--capacity 1.25] ...

All devices are simulated on this machine's cores, so that a time is work, not latency. Phases are measured
by cutting the layer off after each: a phase's time is what it adds to forward and backward of those before.
The routing is that of a random router: nearly balanced. All candidates run in turn in one process and each is
judged by its cheapest run in CPU seconds of this process, over the number of cores: on a machine that does nothing
else this is the time on the clock, and other work disturbs it least.
"""

import argparse
import dataclasses
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from moejax.axes import EXPERT
from moejax.config import Config, DataConfig, MeshConfig, ModelConfig, MoEConfig, MoEModelConfig
from moejax.moe.exchange import make_exchange
from moejax.moe.experts import ExpertWeights, experts
from moejax.moe.layer import moe_layer
from moejax.moe.router import RouterWeights, route
from moejax.sharding import make_mesh

PHASES = ("route", "plan", "dispatch", "experts", "combine", "all")


def cut_layer(phase: str, config: Config):
    """The layer up to and with `phase`, as a function of x, router and expert weights to a scalar."""
    exchange, m = make_exchange(config), config.model.moe

    def run(x_TD, router, gate_up, down):
        valid_T = jnp.ones(x_TD.shape[0], bool)
        weights = ExpertWeights(gate_up, down)
        if phase == "all":
            y, s = moe_layer(x_TD[None], x_TD[None], valid_T[None], RouterWeights(router), weights, config, exchange)
            return jnp.sum(jnp.square(y)) + s.balance_sum + s.z_sum
        chosen = route(x_TD, valid_T, RouterWeights(router), m)
        total = jnp.sum(jnp.square(chosen.weight_TK))
        if phase == "route":
            return total
        plan = exchange.plan(chosen.expert_TK, chosen.weight_TK)
        total += sum(jnp.sum(a).astype(jnp.float32) for a in jax.tree.leaves(plan))
        if phase == "plan":
            return total
        rows, weight, plan = exchange.dispatch(x_TD, jnp.where(plan.kept_TK, chosen.weight_TK, 0.0), plan)
        if phase == "dispatch":
            return total + jnp.sum(jnp.square(rows)) + jnp.sum(jnp.square(weight))
        out = experts(rows, weight, plan.sizes_e, weights, m.activation, False)
        if phase == "experts":
            return total + jnp.sum(jnp.square(out))
        return total + jnp.sum(jnp.square(exchange.combine(out, plan)))

    return run


def jitted(function, config: Config):
    """Value and gradients on every device of the mesh; expert weights are sharded, the rest replicated."""
    mesh = make_mesh(config.mesh)
    split, one = PartitionSpec(EXPERT), PartitionSpec()
    specs = (split, one, split, split)

    def body(*args):
        value, grads = jax.value_and_grad(function, argnums=(0, 1, 2, 3))(*args)
        return jax.lax.psum(value, EXPERT), grads

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(one, specs), check_vma=True))
    return mapped, [NamedSharding(mesh, spec) for spec in specs]


def dense(x_TD, router, gate_up, down):
    """FFN of the active width, the same on every device."""
    hidden = x_TD @ gate_up
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jnp.sum(jnp.square((jax.nn.silu(gate) * up) @ down)) + 0.0 * jnp.sum(router)


def fastest(candidates: dict, rounds: int) -> dict[str, float]:
    """CPU seconds over cores of the cheapest of `rounds` runs, candidates in turn."""
    best = dict.fromkeys(candidates, float("inf"))
    for attempt in range(rounds + 1):
        for name, (run, args) in candidates.items():
            start = time.process_time()
            jax.block_until_ready(run(*args))
            if attempt:
                best[name] = min(best[name], (time.process_time() - start) / (os.cpu_count() or 1))
    return best


def main() -> None:
    """Measure every exchange asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchange", default="padded,padded+dedup,ragged,gather")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--rows", type=int, default=256, help="rows of an expert")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--capacity", type=float, default=1.25, help="0 for no drop")
    parser.add_argument("--drop-order", default="weight")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--phases", default=",".join(PHASES))
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.ranks)

    tokens = args.rows * args.experts // args.top_k
    dtype, rng = jnp.dtype(args.dtype), np.random.default_rng(0)
    draw = lambda *s: (rng.standard_normal(s) / np.sqrt(s[-2])).astype(np.float32)  # noqa: E731
    model = MoEModelConfig(num_experts=args.experts, top_k=args.top_k, expert_dim=args.hidden)
    base = Config(
        mesh=MeshConfig(expert=args.ranks),
        model=dataclasses.replace(ModelConfig(), d_model=args.width, moe=model),
        data=DataConfig(batch_size=args.ranks),
    )
    x, router = draw(tokens, args.width) * np.sqrt(tokens), draw(args.width, args.experts)
    gate_up, down = draw(args.experts, args.width, 2 * args.hidden), draw(args.experts, args.hidden, args.width)
    arrays = [
        x.astype(dtype),
        router,
        gate_up.reshape(args.experts, args.width, 2, -1).astype(dtype),
        down.astype(dtype),
    ]
    active = args.top_k * args.hidden
    wide = [arrays[0], router, draw(args.width, 2 * active).astype(dtype), draw(active, args.width).astype(dtype)]
    candidates = {}
    for name in args.exchange.split(","):
        exchange, _, dedup = name.partition("+")
        moe = MoEConfig(
            exchange,
            args.capacity or None,
            deduplicate=bool(dedup),
            drop_order=args.drop_order if args.capacity else "weight",
        )
        config = dataclasses.replace(base, moe=moe)
        for phase in args.phases.split(","):
            run, shardings = jitted(cut_layer(phase, config), config)
            candidates[name, phase] = run, jax.device_put(arrays, shardings)
    mesh = make_mesh(base.mesh)
    split, one = PartitionSpec(EXPERT), PartitionSpec()
    specs = (split, one, one, one)

    def dense_body(*a):
        value, grads = jax.value_and_grad(dense, argnums=(0, 2, 3))(*a)
        return jax.lax.psum(value, EXPERT), grads

    run = jax.jit(
        jax.shard_map(dense_body, mesh=mesh, in_specs=specs, out_specs=(one, (split, one, one)), check_vma=True)
    )
    candidates["dense", "all"] = run, jax.device_put(wide, [NamedSharding(mesh, s) for s in specs])
    best = fastest(candidates, args.rounds)
    reference = best["dense", "all"]
    print(
        f"jax {jax.__version__}, {args.ranks} devices on {os.cpu_count()} cores, {tokens} tokens, N {args.experts}, "
        f"K {args.top_k}, D {args.width}, F {args.hidden}, {dtype.name}, "
        f"capacity {args.capacity or 'none'}, random router"
    )
    print(f"dense FFN of active width {active}: {1e3 * reference:.0f} ms")
    for name in args.exchange.split(","):
        times = {phase: best[name, phase] for phase in args.phases.split(",")}
        before, parts = 0.0, []
        for phase, seconds in times.items():
            parts.append(f"{phase if phase != 'all' else 'losses'} {1e3 * (seconds - before):.0f}")
            before = seconds
        line = f"{name}: {1e3 * times['all']:.0f} ms, {times['all'] / reference:.2f} of dense"
        if {"dispatch", "experts", "all"} <= times.keys():
            inside = times["experts"] - times["dispatch"]
            line += f"; outside experts {1 - inside / times['all']:.0%}; " + ", ".join(parts) + " ms"
        print(line, flush=True)


if __name__ == "__main__":
    main()
