"""Grouped matmuls of other packages, for the benchmark, where they are installed; nothing else reads this."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax

Candidate = Callable[[dict[str, jax.Array]], object]
"""A call on the benchmark's operands, ready to be timed."""


def tokamax(direction: str, ffn: Callable) -> Candidate | None:
    """Tokamax's `ragged_dot` and its gradients; None where it is not installed.

    Args:
        direction: `forward`, `dgrad`, `wgrad` or `ffn`.
        ffn: Makes the expert FFN with its gradients of a matmul (rows, weights, sizes).
    """
    if importlib.util.find_spec("tokamax") is None:
        return None
    matmul = importlib.import_module("tokamax").ragged_dot
    if direction == "forward":
        return jax.jit(lambda data: matmul(data["x"], data["gate_up"], data["sizes"]))
    if direction == "ffn":
        return jax.jit(ffn(matmul))
    at = 0 if direction == "dgrad" else 1

    def gradient(data: dict[str, jax.Array]) -> jax.Array:  # the forward product is dead code
        _, pullback = jax.vjp(lambda x, w: matmul(x, w, data["sizes"]), data["x"], data["gate_up"])
        return pullback(data["grad"])[at]

    return jax.jit(gradient)


class _Queued:
    """Work that torch has queued on the GPU; `jax.block_until_ready` waits for it."""

    def __init__(self, torch: Any, tensors: object) -> None:
        self._torch, self.tensors = torch, tensors

    def block_until_ready(self) -> "_Queued":
        self._torch.cuda.synchronize()
        return self


def torch(direction: str) -> Candidate | None:
    """Torch's `grouped_mm` on the same values; None without torch, that function, or CUDA in both packages."""
    if jax.default_backend() != "gpu" or importlib.util.find_spec("torch") is None:
        return None
    package: Any = importlib.import_module("torch")
    matmul = getattr(package.nn.functional, "grouped_mm", None) or getattr(package, "_grouped_mm", None)
    if matmul is None or not package.cuda.is_available():
        return None
    tensors: dict[str, Any] = {}  # made once, in the first call, which is not timed

    def run(data: dict[str, jax.Array]) -> _Queued:
        if not tensors:
            jax.block_until_ready(data)
            tensors.update({name: package.from_dlpack(array) for name, array in data.items()})
            tensors["ends"] = tensors["sizes"].cumsum(0, dtype=package.int32)
        return _Queued(
            package, _torch_step(package, functools.partial(matmul, offs=tensors["ends"]), tensors, direction)
        )

    return run


def _torch_step(package: Any, matmul: Callable, data: dict[str, Any], direction: str) -> object:
    if direction == "forward":
        return matmul(data["x"], data["gate_up"])
    if direction == "dgrad":
        return matmul(data["grad"], data["gate_up"].transpose(1, 2))
    if direction == "wgrad":
        return matmul(data["x"].t(), data["grad"])
    leaves = [data[name].detach().requires_grad_() for name in ("x", "gate_up", "down")]
    gate, up = matmul(leaves[0], leaves[1]).chunk(2, dim=-1)
    out = matmul(package.nn.functional.silu(gate) * up, leaves[2])
    return out, package.autograd.grad(out, leaves, data["grad_out"])
