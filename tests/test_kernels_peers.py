"""Peers of the kernel benchmark: stand-ins for packages that tests do not install see the operands that they should.

The torch peer was also run with torch 2.13 itself (on CPU, all four directions equal to the reference to bfloat16).
"""

import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace

import jax
import kernels_oracle as oracle
import numpy as np
import pytest

from moejax.kernels import Backends, bench, peers

CASE = bench.Case(8, 3, 24, 12, "float32", "skewed")


class Tensor:
    """What the peer asks of a torch tensor, in NumPy."""

    def __init__(self, array):
        self.array = np.asarray(array)

    def cumsum(self, dim, dtype):
        return Tensor(np.cumsum(self.array, dim, dtype=dtype))

    def transpose(self, a, b):
        return Tensor(self.array.swapaxes(a, b))

    def t(self):
        return Tensor(self.array.T)


def grouped_mm(a, b, *, offs):
    """By its documentation: `offs` are ends of groups, of the rows of a, or of the contraction if b is 2D."""
    assert offs.array.dtype == np.int32
    sizes = np.diff(offs.array, prepend=0)
    return Tensor(oracle.gmm(a.array, b.array, sizes) if b.array.ndim == 3 else oracle.wgrad(a.array.T, b.array, sizes))


def install(monkeypatch, name, **attributes):
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("direction", ["forward", "dgrad", "wgrad"])
def test_torch(monkeypatch, direction):
    waits = []
    cuda = SimpleNamespace(is_available=lambda: True, synchronize=lambda: waits.append(1))
    functional = SimpleNamespace(grouped_mm=grouped_mm)
    nn = SimpleNamespace(functional=functional)
    install(monkeypatch, "torch", cuda=cuda, nn=nn, int32=np.int32, from_dlpack=Tensor)
    assert peers.torch(direction) is None  # no GPU here
    monkeypatch.setattr(peers.jax, "default_backend", lambda: "gpu")
    candidate, data = peers.torch(direction), bench.operands(CASE)
    assert candidate is not None
    queued = jax.block_until_ready(candidate(data))
    assert waits == [1]
    want = jax.jit(bench.grouped(direction, Backends.all("reference")))(data)
    assert oracle.relative_error(queued.tensors.array, np.asarray(want)) < 1e-6


@pytest.mark.parametrize("direction", bench.DIRECTIONS)
def test_tokamax(monkeypatch, direction):
    install(monkeypatch, "tokamax", ragged_dot=jax.lax.ragged_dot)
    data = bench.operands(CASE)
    candidate = bench.candidates(CASE, direction, ["padded"])["tokamax"]
    want = jax.jit(bench.grouped(direction, Backends.all("reference")))(data)
    for got, right in zip(jax.tree.leaves(candidate(data)), jax.tree.leaves(want), strict=True):
        assert oracle.relative_error(got, np.asarray(right)) < 2e-6


def test_absent_peers_are_left_out(monkeypatch):
    for name in ("torch", "tokamax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert set(bench.candidates(CASE, "forward", ["padded"])) == {"dense", "auto", "padded"}
