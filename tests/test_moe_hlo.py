"""The compiled collectives of a layer are the designed ones: on CPU, and for chips that are not there."""

import collections
import dataclasses
import functools
import importlib.util
import math
import os
import re
from importlib import resources

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the CUDA plugin asks for a driver otherwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_moe_exchange import run_config

from moejax.axes import EXPERT
from moejax.config import MoEModelConfig
from moejax.kernels import target
from moejax.model.recompute import policy
from moejax.moe.exchange import make_exchange
from moejax.moe.experts import ExpertWeights
from moejax.moe.layer import moe_layer
from moejax.moe.router import RouterWeights
from moejax.plan.hlo import collectives

E, D, F, T, RANKS = 16, 128, 128, 64, 8
SLOW = pytest.mark.slow


def compiled_text(mesh: Mesh, exchange: str, top_k: int, backward: bool, remat: str = "none", **moe) -> str:
    """HLO of one layer on T tokens a device; recomputed in backward by a policy of the decoder."""
    config = run_config(exchange, RANKS, top_k, **moe)
    split, one = PartitionSpec(EXPERT), PartitionSpec()

    def forward(x, router, gate_up, down):
        valid = jnp.ones(x.shape[:2], bool)
        weights = RouterWeights(router), ExpertWeights(gate_up, down)
        return moe_layer(x, x, valid, *weights, config, make_exchange(config))[0]

    if remat != "none":
        forward = jax.checkpoint(forward, policy=policy(remat))  # type: ignore[arg-type]

    def both(*args):
        y, pullback = jax.vjp(forward, *args)
        return pullback(jnp.sin(y))

    specs = (split, one, split, split)
    out = specs if backward else split
    f = jax.shard_map(both if backward else forward, mesh=mesh, in_specs=specs, out_specs=out, check_vma=True)
    shapes = [(RANKS, T, D), (D, E), (E, D, 2, F), (E, F, D)]
    args = [
        jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, p))
        for s, p in zip(shapes, specs, strict=True)
    ]
    text = jax.jit(f).lower(*args).compile().as_text()
    assert text is not None
    return text


def found(text: str) -> collections.Counter:
    """Collectives: kind, type, elements. How small sums and copies cross is XLA's choice: `share` and `sum`."""
    kinds = {("all-gather", "s32"): "share", ("all-reduce", "s32"): "share", ("all-reduce", "f32"): "sum"}
    moved = collections.Counter()
    for item in collectives(text):
        for shape in item.shapes:
            moved[kinds.get((item.kind, item.dtype), item.kind), item.dtype, math.prod(shape)] += item.times
    return moved


def designed(exchange: str, deduplicate: bool = False, tile: int = 1) -> collections.Counter:
    """The collectives of forward and backward with capacity 1 and K = 2: rows with weights and places, there and back.

    `tile` is what the width of a ragged payload is padded to.
    """
    slots, lanes = (T * 2, 2 if deduplicate else 1)  # rows of all peers together: capacity x K x T, with padded too
    moved = collections.Counter({("share", "s32", RANKS * E): 1, ("sum", "f32", D * E): 1})  # counts; router gradient
    if exchange == "gather":
        rows, weights = RANKS * T * D, RANKS * T * 2
        moved |= {(kind, "f32", n): 1 for n in (weights,) for kind in ("all-gather", "reduce-scatter")}
        moved |= {(kind, "f32", rows): 2 for kind in ("all-gather", "reduce-scatter")}
        return moved + collections.Counter({("share", "s32", 2 * weights): 1})  # rank and row of all routes
    kind = "all-to-all" if exchange == "padded" else "ragged-all-to-all"
    there = lanes * (2 if exchange == "padded" or deduplicate else 1)
    for width in (D + there, D + lanes):  # rows as 32-bit integers; their gradients carry gradients of weights
        moved[kind, "u32", slots * -(-width // tile) * tile] += 1
    moved[kind, "f32", slots * D] += 2  # results, and their gradients
    if exchange == "ragged" and deduplicate:
        moved["share", "s32", RANKS * RANKS] += 1  # parcels of every pair
    return moved


def sorts(text: str) -> int:
    """Sorts of as much as a token each, those of libraries included; CPU matmuls sort a list of a few windows."""
    large = 0
    for types in re.findall(r"= (.*?) sort(?:-start)?\(", text):
        large += max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", types)) >= T
    return large + text.count("DeviceRadixSort")


def updates(text: str) -> collections.Counter:
    """Shapes of what follows the two buffers among the operands of ragged_all_to_all: offsets and sizes of updates."""
    shapes = dict(re.findall(r"(%[\w.\-]+) = \w+\[([\d,]*)\]", text))
    operands = re.findall(r" ragged-all-to-all(?:-start)?\(([^)]*)\)", text)
    return collections.Counter(shapes[name] for found in operands for name in re.findall(r"%[\w.\-]+", found)[2:])


@functools.cache
def _cpu() -> Mesh:
    return Mesh(np.asarray(jax.devices()[:RANKS]), (EXPERT,))


@pytest.mark.parametrize(
    ("exchange", "deduplicate"), [("padded", False), ("gather", False), pytest.param("padded", True, marks=SLOW)]
)
def test_collectives_on_a_cpu_are_the_designed_ones(exchange, deduplicate):
    text = compiled_text(_cpu(), exchange, 2, True, capacity=1.0, drop_order="position", deduplicate=deduplicate)
    assert found(text) == designed(exchange, deduplicate)
    assert 1 <= sorts(text) <= 2  # routes by expert at the source; the choice of experts, where it is no library call


@pytest.mark.parametrize(("remat", "repeated"), [("save_exchange", 0), pytest.param("full", 1, marks=SLOW)])
def test_recomputation_repeats_no_exchange_unless_asked(remat, repeated):
    """With `full` dispatched rows cross again, and counts, unless XLA merges them; what comes back is not needed."""
    text = compiled_text(_cpu(), "padded", 2, True, remat, capacity=1.0, drop_order="position")
    got, want = found(text), designed("padded")
    want["all-to-all", "u32", T * 2 * (D + 2)] += repeated
    counts = "share", "s32", RANKS * E
    assert want[counts] <= got[counts] <= want.pop(counts) + repeated
    got.pop(counts)
    assert got == want


def test_padded_slots_and_deduplicated_slots():
    """The static buffers are the formula: ranks x budget, and ranks x tokens where a token crosses once."""
    for deduplicate, slots in ((False, T * 2), (True, T)):  # K = 2 of 2 local experts may all go to one rank
        text = compiled_text(_cpu(), "padded", 2, False, deduplicate=deduplicate)
        shapes = re.findall(rf"f32\[1,(\d+),{D}\]", "\n".join(li for li in text.splitlines() if " all-to-all(" in li))
        assert set(map(int, shapes)) == {slots}


@functools.cache
def _tpu() -> Mesh:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install libtpu (137 MB)")
    topology = topologies.get_topology_desc("v5p:2x2x2", platform="tpu")
    return topologies.make_mesh(topology, (RANKS,), (EXPERT,))


@pytest.mark.parametrize(("exchange", "deduplicate"), [("ragged", False), ("ragged", True), ("padded", False)])
def test_collectives_on_a_tpu_are_the_designed_ones(exchange, deduplicate):
    mesh, chosen = _tpu(), {"capacity": 1.0, "drop_order": "position", "deduplicate": deduplicate}
    with target("tpu", "TPU v5"):
        text = compiled_text(mesh, exchange, 2, True, **chosen)
    assert found(text) == designed(exchange, deduplicate, tile=128 if exchange == "ragged" else 1)
    assert sorts(text) == 2  # routes by expert at the source; the choice of experts: none at the receiver
    if exchange == "ragged":  # one update a destination, or one a destination and local expert
        assert updates(text) == {str(RANKS if deduplicate else E): 4 * 4}


@functools.cache
def _cuda() -> Mesh:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("the CUDA compiler is not installed: pip install 'moejax[gpu]' (4.4 GB)")
    config = resources.files("moejax.plan").joinpath("targets", "h200.txtpb").read_text()
    topology = topologies.get_topology_desc("h200", platform="cuda", target_config=config, topology="1x8x1")
    return topologies.make_mesh(topology, (RANKS,), (EXPERT,))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    ("exchange", "deduplicate"), [("ragged", False), ("ragged", True), pytest.param("padded", False, marks=SLOW)]
)
def test_collectives_on_gpus_are_the_designed_ones(exchange, deduplicate):
    mesh, chosen = _cuda(), {"capacity": 1.0, "drop_order": "position", "deduplicate": deduplicate}
    with target("gpu", "NVIDIA H200"):
        text = compiled_text(mesh, exchange, 2, True, **chosen)
    assert found(text) == designed(exchange, deduplicate)
    assert sorts(text) == 2
    if exchange == "ragged":
        assert updates(text) == {str(RANKS if deduplicate else E): 4 * 4}


@pytest.mark.parametrize("exchange", ["ragged", "padded"])
def test_deduplication_saves_what_uniform_routing_predicts(exchange):
    """8 of 256 experts over 8 ranks: a token's routes reach 5.3 ranks on average, so 34% of the rows stay at home."""
    rng = np.random.default_rng(0)
    expert = np.argsort(rng.random((RANKS, 512, 256)), axis=2)[:, :, :8].astype(np.int32)
    model = MoEModelConfig(num_experts=256, top_k=8)
    config = run_config(exchange, RANKS, 8, deduplicate=True, capacity=1.25)
    exchanged = make_exchange(dataclasses.replace(config, model=dataclasses.replace(config.model, moe=model)))

    def count(expert):
        plan = exchanged.plan(expert[0], jnp.ones(expert.shape[1:]))
        return jax.lax.psum(jnp.stack([plan.sent, plan.saved, jnp.sum(plan.kept_TK, dtype=jnp.int32)]), EXPERT)

    mapped = jax.shard_map(count, mesh=_cpu(), in_specs=PartitionSpec(EXPERT), out_specs=PartitionSpec())
    sent, saved, kept = np.asarray(jax.jit(mapped)(expert), float)
    assert kept == expert.size  # so much capacity drops nothing here
    if exchange == "padded":  # its slots cross, full or not: one for each token instead of 1.25
        assert (sent, saved) == (RANKS * 7 * 512, RANKS * 7 * 128)
        return
    want = math.comb(224, 8) / math.comb(256, 8)  # 8 routes reach 8 (1 - that) ranks
    assert want == pytest.approx(0.34, abs=0.01)
    assert saved / (sent + saved) == pytest.approx(want, abs=0.005)
