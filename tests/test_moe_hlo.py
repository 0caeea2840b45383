"""The compiled collectives of a layer are the designed ones: on CPU, and for chips that are not there."""

import collections
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
from moejax.kernels import target
from moejax.model.recompute import policy
from moejax.moe.exchange import make_exchange
from moejax.moe.experts import ExpertWeights
from moejax.moe.layer import moe_layer
from moejax.moe.router import RouterWeights
from moejax.moe.statistics import pair_matrix

E, D, F, T, RANKS = 16, 128, 128, 64, 8
COLLECTIVES = ("all-to-all", "ragged-all-to-all", "all-gather", "reduce-scatter", "all-reduce", "sort")


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


def counts(text: str) -> collections.Counter:
    """Collectives and sorts in HLO text, by name and whether they move rows of width D (or a little more: XLA may
    merge the weights and row numbers of a slot into its row)."""
    found = collections.Counter()
    for line in text.splitlines():
        match = re.search(rf" ({'|'.join(COLLECTIVES)})(-start)?\(", line)
        if match:
            last_dims = [int(n) for n in re.findall(r"(?:f32|u32)\[(?:\d+,)*(\d+)\]", line[: match.start()])]
            rows = match[1] != "sort" and max(last_dims, default=0) >= D
            found[match[1], "rows" if rows else "small"] += 1
    return found


@functools.cache
def _cpu() -> Mesh:
    return Mesh(np.asarray(jax.devices()[:RANKS]), (EXPERT,))


def rows_moved(found: collections.Counter) -> dict[str, int]:
    return {name: n for (name, what), n in found.items() if what == "rows"}


@pytest.mark.parametrize(
    ("exchange", "remat", "rows"),
    [
        ("padded", "none", {"all-to-all": 4}),
        ("padded", "save_exchange", {"all-to-all": 4}),
        pytest.param("padded", "full", {"all-to-all": 5}, marks=pytest.mark.slow),  # combine's result is not needed
        pytest.param("gather", "none", {"all-gather": 2, "reduce-scatter": 2}, marks=pytest.mark.slow),
    ],
)
def test_rows_cross_twice_forward_and_twice_backward(exchange, remat, rows):
    found = counts(compiled_text(_cpu(), exchange, 2, True, remat, capacity=1.0, drop_order="position"))
    assert rows_moved(found) == rows, found
    if exchange == "padded":  # counts of routes
        assert found["all-gather", "small"] == (2 if remat == "full" else 1), found
    if remat == "none":
        assert found["sort", "small"] <= 2, found  # routes by expert at the source; the choice of experts


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


@pytest.mark.parametrize("deduplicate", [False, True])
def test_ragged_for_a_tpu_is_native_and_sorts_at_the_source_alone(deduplicate):
    mesh = _tpu()
    with target("tpu", "TPU v5"):
        text = compiled_text(mesh, "ragged", 2, True, capacity=1.0, drop_order="position", deduplicate=deduplicate)
    found = counts(text)
    assert rows_moved(found) == {"ragged-all-to-all": 4}, found
    assert found["sort", "small"] == 2, found  # routes by expert at the source; the choice of experts
    updates = E if not deduplicate else RANKS  # one a destination and local expert, or one a destination
    assert re.search(rf"ragged-all-to-all.*s32\[{updates}\]", text) or f"s32[{updates}]" in text


@functools.cache
def _cuda() -> Mesh:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("the CUDA compiler is not installed: pip install 'moejax[gpu]' (4.4 GB)")
    config = resources.files("moejax.plan").joinpath("targets", "h200.txtpb").read_text()
    topology = topologies.get_topology_desc("h200", platform="cuda", target_config=config, topology="1x8x1")
    return topologies.make_mesh(topology, (RANKS,), (EXPERT,))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_ragged_for_a_gpu_is_native():
    mesh = _cuda()
    with target("gpu", "NVIDIA H200"):
        text = compiled_text(mesh, "ragged", 2, True, capacity=1.0)
    assert rows_moved(counts(text)) == {"ragged-all-to-all": 4}


def test_deduplication_saves_what_uniform_routing_predicts():
    """8 of 256 experts over 8 ranks: a token's routes reach 5.3 ranks on average, so 34% of the rows stay at home."""
    from moejax.moe.admission import sort_routes
    from moejax.moe.exchange.interface import place
    from moejax.moe.exchange.parcels import make_shared_parcels

    rng = np.random.default_rng(0)
    expert = jnp.asarray(np.argsort(rng.random((4096, 256)), axis=1)[:, :8], jnp.int32)
    by_expert = sort_routes(expert, jnp.zeros(expert.shape), 256, by_weight=False)
    places = place(expert, by_expert, by_expert.counts_E[None], 0, 8)
    parcels = make_shared_parcels(places, 8)
    ranks_reached = 8 * (1 - math.comb(224, 8) / math.comb(256, 8))
    want = 1 - ranks_reached / 8
    assert want == pytest.approx(0.34, abs=0.01)
    assert 1 - int(parcels.count_P.sum()) / expert.size == pytest.approx(want, abs=0.005)


def test_pair_matrix():
    rng = np.random.default_rng(0)
    expert = rng.integers(0, E + 1, (RANKS, 20, 3)).astype(np.int32)
    f = lambda e: pair_matrix(e[0], E, RANKS, EXPERT)[None]  # noqa: E731
    got = jax.jit(jax.shard_map(f, mesh=_cpu(), in_specs=PartitionSpec(EXPERT), out_specs=PartitionSpec(EXPERT)))(
        expert
    )
    want = [[np.sum(expert[s] // (E // RANKS) == p) for p in range(RANKS)] for s in range(RANKS)]
    np.testing.assert_array_equal(got[3], want)
