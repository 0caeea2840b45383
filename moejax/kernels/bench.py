"""Times grouped matmuls against a dense matmul of equal FLOPs, side by side in one process on the same values.

Per expert and load: the three directions, and a whole expert FFN forward and backward. Candidates take turns;
a time is the median over rounds of batches of calls. Work is counted on the rows in use.
"""

import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from moejax.kernels import dispatch, peers
from moejax.kernels.ffn import expert_ffn
from moejax.kernels.kernel import Backends, Kernel
from moejax.kernels.table import choose_all

DIRECTIONS = ("forward", "dgrad", "wgrad", "ffn")

PEAK_TFLOPS = {  # dense bfloat16, by device kind, from the vendors' data sheets
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H200": 989.5,
    "NVIDIA B200": 2250.0,
    "NVIDIA B300": 2250.0,
    "NVIDIA GB200": 2500.0,
    "TPU v4": 275.0,
    "TPU v5": 459.0,
    "TPU v5 lite": 197.0,
    "TPU v6 lite": 918.0,
    "TPU7x": 1153.5,  # of one device, which is half a chip
}

_RAGGED_LIMIT = 2e9  # FLOPs of a dense expansion beyond which `xla` is left out on CPU


@dataclass(frozen=True)
class Case:
    """One measured situation.

    Args:
        rows: Rows per expert, mean over experts.
        groups: Experts G.
        width: Model width D.
        hidden: Expert width F; gate and up are one matmul of width 2 F.
        dtype: Type of all operands.
        load: `uniform`, or `skewed` (Dirichlet with concentration 0.5).
    """

    rows: int
    groups: int
    width: int
    hidden: int
    dtype: str
    load: str

    def sizes(self) -> np.ndarray:
        """Rows of each expert, int32 [G]."""
        total = self.rows * self.groups
        if self.load == "uniform":
            return np.full(self.groups, self.rows, np.int32)
        rng = np.random.default_rng(0)
        return rng.multinomial(total, rng.dirichlet(np.full(self.groups, 0.5))).astype(np.int32)

    def flops(self, direction: str) -> int:
        """FLOPs of one call on the rows in use."""
        return (18 if direction == "ffn" else 4) * self.rows * self.groups * self.width * self.hidden


def imbalance(sizes: np.ndarray) -> float:
    """I_H = 1 - H / log n of the load: 0 when balanced, 1 when one expert has everything."""
    share = sizes[sizes > 0] / sizes.sum()
    return float(1 + (share * np.log(share)).sum() / np.log(len(sizes))) if len(sizes) > 1 else 0.0


@dataclass(frozen=True)
class Measurement:
    """One line of the result; seconds are the median of a call."""

    device: str
    case: Case
    imbalance: float
    direction: str
    candidate: str
    seconds: float
    tflops: float
    ratio_to_dense: float
    percent_of_peak: float | None


def operands(case: Case) -> dict[str, jax.Array]:
    """Random operands of every candidate: x [M, D], h and its like [M, 2F], weights, sizes.

    The dense matmul has the first expert's weights apart: cut off in its own program they would be copied there.
    """
    rng = np.random.default_rng(1)
    m, g, d, f = case.rows * case.groups, case.groups, case.width, case.hidden

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) / np.sqrt(shape[-2]), case.dtype)

    found = {
        "x": normal(m, d),
        "grad": normal(m, 2 * f),
        "grad_out": normal(m, d),
        "gate_up": normal(g, d, 2 * f),
        "down": normal(g, f, d),
        "sizes": jnp.asarray(case.sizes()),
    }
    return found | {"dense_gate_up": found["gate_up"][0], "dense_down": found["down"][0]}


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _ffn(matmul: Callable, x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    return matmul(_swiglu(*jnp.split(matmul(x, gate_up), 2, axis=-1)), down)


def _step(ffn: Callable, data: dict[str, jax.Array], dense: bool) -> tuple[jax.Array, ...]:
    """Result and gradients of x and both weights."""
    weights = (data[f"dense_{name}" if dense else name] for name in ("gate_up", "down"))
    out, pullback = jax.vjp(ffn, data["x"], *weights)
    return out, *pullback(data["grad_out"])


def _ffn_step(matmul: Callable) -> Callable[[dict[str, jax.Array]], object]:
    """The expert FFN with its gradients, of a matmul (rows, weights, sizes)."""
    return lambda data: _step(
        functools.partial(_ffn, lambda rows, weights: matmul(rows, weights, data["sizes"])), data, dense=False
    )


@functools.cache  # the same function for all loads of a shape, so that it is compiled once
def dense(direction: str) -> Callable[[dict[str, jax.Array]], object]:
    """All rows through the first expert."""
    if direction == "forward":
        return lambda data: data["x"] @ data["dense_gate_up"]
    if direction == "dgrad":
        return lambda data: data["grad"] @ data["dense_gate_up"].T
    if direction == "wgrad":
        return lambda data: data["x"].T @ data["grad"]
    return lambda data: _step(functools.partial(_ffn, jnp.matmul), data, dense=True)


@functools.cache
def grouped(direction: str, backends: Backends) -> Callable[[dict[str, jax.Array]], object]:
    """The kernels of this package."""
    if direction == "forward":
        return lambda data: dispatch.gmm(data["x"], data["gate_up"], data["sizes"], kernel=backends.forward)
    if direction == "dgrad":
        return lambda data: dispatch.gmm(
            data["grad"], data["gate_up"], data["sizes"], kernel=backends.dgrad, transpose_rhs=True
        )
    if direction == "wgrad":
        return lambda data: dispatch.wgrad(data["x"], data["grad"], data["sizes"], kernel=backends.wgrad)

    def ffn(data: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        def function(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
            up = gate_up.reshape(*gate_up.shape[:2], 2, -1)
            return expert_ffn(x, up, down, data["sizes"], activation=_swiglu, backend=backends)

        return _step(function, data, dense=False)

    return ffn


def candidates(case: Case, direction: str, names: Sequence[str]) -> dict[str, Callable]:
    """Dense, the table's choice (`auto`), the named backends, and installed peers; jitted."""
    m, largest = case.rows * case.groups, int(case.sizes().max())
    found: dict[str, Callable] = {"dense": dense(direction)}
    chosen = choose_all(case.dtype, m, case.groups, None)
    found["auto"] = grouped(direction, chosen)
    for name in names:
        if Backends.all(name) == chosen:
            continue
        expanded = case.flops(direction) * case.groups
        if name == "xla" and jax.default_backend() == "cpu" and expanded > _RAGGED_LIMIT:
            continue
        kernel = Kernel(name, max_group_size=largest if name == "padded" else None)
        found[name] = grouped(direction, Backends.all(kernel))
    ready: dict[str, Callable] = {name: jax.jit(function) for name, function in found.items()}
    others = {"tokamax": peers.tokamax(direction, _ffn_step), "torch": peers.torch(direction)}
    return ready | {name: function for name, function in others.items() if function is not None}


def timed(functions: dict[str, Callable], data: object, rounds: int, budget_seconds: float) -> dict[str, float]:
    """Median seconds of a call of each function, taking turns; fewer rounds than asked for once the budget is spent.

    A function that fails is left out, with a warning that says why.
    """
    batch: dict[str, int] = {}
    for name, function in functions.items():
        try:
            jax.block_until_ready(function(data))  # compile
            start = time.perf_counter()
            jax.block_until_ready(function(data))
            batch[name] = max(1, min(100, round(2e-3 / (time.perf_counter() - start))))
        except Exception as error:
            warnings.warn(f"{name} is left out: {type(error).__name__}: {str(error)[:300]}", stacklevel=2)
    times: dict[str, list[float]] = {name: [] for name in batch}
    begin = time.perf_counter()
    for done in range(rounds):
        spent = time.perf_counter() - begin
        if (done >= 3 and spent > budget_seconds) or (done and spent > 10 * budget_seconds):  # long calls vary less
            break
        for name, calls in batch.items():
            start = time.perf_counter()
            results = [functions[name](data) for _ in range(calls)]
            jax.block_until_ready(results)
            times[name].append((time.perf_counter() - start) / calls)
            del results
    return {name: statistics.median(values) for name, values in times.items()}


def measure(
    case: Case, names: Sequence[str], rounds: int, budget_seconds: float, deadline: float = math.inf
) -> Iterator[Measurement]:
    """Measure all directions of one case; none is begun after `deadline` (`time.monotonic`)."""
    if time.monotonic() > deadline:
        return
    data, skew = operands(case), imbalance(case.sizes())
    device = jax.devices()[0].device_kind
    for direction in DIRECTIONS:
        if time.monotonic() > deadline:
            return
        times = timed(candidates(case, direction, names), data, rounds, budget_seconds)
        for name, seconds in times.items():
            tflops = case.flops(direction) / seconds / 1e12
            peak = PEAK_TFLOPS.get(device) if case.dtype == "bfloat16" else None
            yield Measurement(
                device, case, skew, direction, name, seconds, tflops, seconds / times.get("dense", math.nan),
                100 * tflops / peak if peak else None,
            )  # fmt: skip
