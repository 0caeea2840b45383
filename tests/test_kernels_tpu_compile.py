"""TPU kernels compile for chips that are not there. Needs the `libtpu` package, which CI installs."""

import functools
import importlib.util
import os

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # compiling holds no chip, so processes need no lock

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.kernels import Kernel, grouped_matmul, target
from moejax.kernels.table import choose_all

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'moejax[tpu]' (137 MB)"
)

# M, K, N, G: the ends of what is promised; the largest weights have 7.5 * 2**30 numbers, past any 32-bit offset
SHAPES = [(16384, 2048, 1024, 8), (131072, 7168, 4096, 256), (16000, 2000, 1000, 16)]


@functools.cache
def _mesh(name: str) -> jax.sharding.Mesh:
    topology = topologies.get_topology_desc(name, platform="tpu")
    return topologies.make_mesh(topology, (len(topology.devices),), ("expert",))


def _compile(name: str, shape: tuple[int, int, int, int], backend) -> int:
    """Compile forward and gradients for one shard of every device, recomputed; return bytes of scratch memory."""
    m, k, n, groups = shape
    mesh = _mesh(name)

    def struct(first: int, *dims: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((first * mesh.size, *dims), dtype, sharding=NamedSharding(mesh, P("expert")))

    @jax.checkpoint
    def forward(lhs, rhs, sizes):
        return grouped_matmul(lhs, rhs, sizes, backend=backend)

    def step(lhs, rhs, sizes, grad):
        out, pullback = jax.vjp(lambda lhs, rhs: forward(lhs, rhs, sizes), lhs, rhs)
        return out, *pullback(grad)

    args = (struct(m, k), struct(groups, k, n), struct(groups, dtype=jnp.int32), struct(m, n))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=True)
    with target("tpu", mesh.devices.flat[0].device_kind):
        compiled = jax.jit(mapped).lower(*args).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert backend is None or text.count("tpu_custom_call") >= 3
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chip", ["v5p:2x2x1", "tpu7x:2x2x1"])
def test_all_directions_compile_without_scratch_that_grows(chip, shape):
    m, k, n, groups = shape
    aligned = k % 128 == n % 128 == 0
    # the compiler copies an argument whose dims are no multiples of its own tiles into padded ones
    operands = 2 * (m * k + groups * k * n + m * n)
    assert _compile(chip, shape, Kernel("tpu")) < (16 << 20 if aligned else 1.2 * operands)


def test_native_ragged_dot_has_no_scratch_that_grows():
    """What the table chooses on v5p: the weight gradient is not made in float32 first."""
    found = [_compile("v5p:2x2x1", shape, None) for shape in ((16384, 2048, 1024, 8), (16384, 2048, 1024, 128))]
    assert found[1] < found[0] + (1 << 20)


def test_table_chooses_by_target():
    with target("tpu", "TPU v5"):
        assert choose_all(jnp.bfloat16, 4096, 8, None).forward.backend == "xla"
    with target("tpu", "TPU7x"):
        assert choose_all(jnp.bfloat16, 4096, 8, None).wgrad.backend == "tpu"
    assert _mesh("v5p:2x2x1").devices.flat[0].device_kind == "TPU v5"
