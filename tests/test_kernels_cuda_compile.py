"""GPU kernels compile for chips that are not there. Needs the `gpu` extra: jax with its CUDA plugin."""

import functools
import importlib.util
import os
import re
from importlib import resources

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the plugin asks for a driver otherwise

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.kernels import Backends, Kernel, expert_ffn, grouped_matmul, target
from moejax.kernels.bench import grouped
from moejax.kernels.tune import TILES
from moejax.nn.activations import ACTIVATIONS, num_inner

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="the CUDA compiler is not installed: pip install 'moejax[gpu]' (4.4 GB)",
    ),
    # jax 0.12 announces the end of this lowering, see BUILD_NOTES.md
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

# M, K, N, G: the ends of what is promised; the largest weights have 7.5 * 2**30 numbers, past any 32-bit offset
SHAPES = [(16384, 2048, 1024, 8), (131072, 2048, 1536, 256), (131072, 7168, 4096, 256), (16000, 2000, 1000, 16)]


@functools.cache
def _mesh(chip: str) -> jax.sharding.Mesh:
    config = resources.files("moejax.plan").joinpath("targets", f"{chip}.txtpb").read_text()
    topology = topologies.get_topology_desc(chip, platform="cuda", target_config=config, topology="1x2x1")
    return topologies.make_mesh(topology, (2,), ("expert",))


def _compile(chip: str, shape: tuple[int, int, int, int], dtype, backend: str | None = None) -> int:
    """Compile forward and gradients for one shard of every device, recomputed; return bytes of scratch memory."""
    m, k, n, groups = shape
    mesh = _mesh(chip)

    def struct(first: int, *dims: int, dtype=dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((first * mesh.size, *dims), dtype, sharding=NamedSharding(mesh, P("expert")))

    forward = jax.checkpoint(functools.partial(grouped_matmul, backend=backend))

    def step(lhs, rhs, sizes, grad):
        out, pullback = jax.vjp(lambda lhs, rhs: forward(lhs, rhs, sizes), lhs, rhs)
        return out, *pullback(grad)

    args = (struct(m, k), struct(groups, k, n), struct(groups, dtype=jnp.int32), struct(m, n))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=True)
    with target("gpu", f"NVIDIA {chip.upper()}"):
        compiled = jax.jit(mapped).lower(*args).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert text.count("moejax_gmm") >= 3
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chip", ["h200", "b200"])
def test_all_directions_compile_without_scratch_that_grows(chip, shape):
    assert _compile(chip, shape, jnp.bfloat16) < 1 << 20


@pytest.mark.parametrize("shape", [*SHAPES[:3], (901, 256, 128, 3)], ids=str)
def test_mosaic_compiles_for_hopper(shape):
    assert _compile("h200", shape, jnp.bfloat16, "mosaic") < 1 << 20


@pytest.mark.parametrize("chip", ["h200"])
def test_float32_compiles(chip):
    assert _compile(chip, (16384, 2048, 1024, 8), jnp.float32) < 1 << 20


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "clamped_swiglu", "relu2"])
def test_expert_ffn_compiles_fused(activation):
    """Forward is two kernels and backward four; neither gathered rows (forward) nor the hidden rows' gradient exist."""
    tokens, m, k, f, groups, inner = 4096, 32768, 2048, 1024, 8, num_inner(activation)
    mesh = _mesh("h200")

    def struct(first: int, *dims: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((first * mesh.size, *dims), dtype, sharding=NamedSharding(mesh, P("expert")))

    def step(x, up, down, scale, sizes, index, grad):
        def ffn(x, up, down, scale):
            return expert_ffn(x, up, down, sizes, scale, index, activation=ACTIVATIONS[activation])

        out, pullback = jax.vjp(ffn, x, up, down, scale)
        return out, *pullback(grad)

    args = (
        struct(tokens, k),
        struct(groups, k, inner, f),
        struct(groups, f, k),
        struct(m, dtype=jnp.float32),
        struct(groups, dtype=jnp.int32),
        struct(m, dtype=jnp.int32),
        struct(m, k),
    )
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=True)
    with target("gpu", "NVIDIA H200"):
        compiled = jax.jit(mapped).lower(*args).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    names = re.findall(r'custom-call\(.*op_name="[^"]*/(moejax_\w+)/pallas_call"', text)
    assert sorted(names) == sorted(
        ["moejax_ffn_hidden", "moejax_ffn_gradient", "moejax_gmm", "moejax_gmm_transposed", *["moejax_gmm_wgrad"] * 2]
    )
    assert memory is not None
    # at most hidden rows, projections or their gradient, and rows or their gradient at a time
    assert memory.temp_size_in_bytes < 2 * m * (f + inner * f + k) + (1 << 21)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gpu", "mosaic"])
@pytest.mark.parametrize("direction", ["forward", "dgrad", "wgrad"])
def test_every_tuning_candidate_compiles(direction, backend):
    """`bench kernels --tune` drops tiles that fail, which is no reason to ship ones that do."""
    mesh = _mesh("h200")
    m, k, n, groups = 16384, 2048, 2048, 8
    shapes = {"x": (m, k), "grad": (m, n), "gate_up": (groups, k, n), "sizes": (groups,)}
    data = {
        name: jax.ShapeDtypeStruct(
            shape, jnp.int32 if name == "sizes" else jnp.bfloat16, sharding=NamedSharding(mesh, P())
        )
        for name, shape in shapes.items()
    }
    for tiles in TILES[backend]["wgrad" if direction == "wgrad" else "gmm"]:
        function = grouped(direction, Backends.all(Kernel(backend, tiles)))
        mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=True)
        assert jax.jit(mapped).lower(data).compile() is not None, tiles
