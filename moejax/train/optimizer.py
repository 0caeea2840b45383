"""AdamW and Muon with settings per group of parameters, and the learning-rate schedule.

Groups follow from the logical dims of each parameter, so a new tensor is grouped by what it is, not by its name.
Clipping is not in here: the step clips, because it knows the global norm.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from moejax.config import Config
from moejax.train.state import map_like_params

Dims = tuple[str | None, ...]
Schedule = Callable[[Any], Any]

MUON_MOMENTUM = 0.95
MUON_RMS = 0.2
"""Size (root mean square) of a Muon update before the learning rate; AdamW's is about this, so both share one rate."""


_MATRIX_COUNTS = ("layers", "experts", "gate_up")


def make_schedule(config: Config) -> Schedule:
    """Return the learning rate as a function of the number of updates made so far.

    Let n = updates + 1 (the update about to be made), N = train.steps, W = optimizer.warmup_steps, f = final_ratio.
    Warm-up: peak * n / W for n <= W. Then, with t growing linearly from 0 to 1 at n = N:
    `cosine`: peak * (f + (1 - f) * (1 + cos(pi * t)) / 2), t starting at n = W.
    `wsd`: peak * (1 - (1 - f) * t), t starting at n = N - decay_fraction * N (but not inside warm-up).
    `constant`: peak. After N the rate stays as it is at N.
    """
    opt, total = config.optimizer, config.train.steps
    warmup = opt.warmup_steps
    start = warmup if opt.schedule == "cosine" else max(warmup, total - round(opt.decay_fraction * total))

    def schedule(updates: Any) -> jax.Array:
        n = jnp.asarray(updates, jnp.float32) + 1
        t = jnp.clip((n - start) / max(total - start, 1), 0, 1)
        match opt.schedule:
            case "cosine":
                factor = opt.final_ratio + (1 - opt.final_ratio) * (1 + jnp.cos(jnp.pi * t)) / 2
            case "wsd":
                factor = 1 - (1 - opt.final_ratio) * t
            case "constant":
                factor = jnp.ones_like(n)
        return opt.learning_rate * jnp.minimum(factor, n / max(warmup, 1)) if warmup else opt.learning_rate * factor

    return schedule


def decays(dims: Dims) -> bool:
    """Return whether weight decay applies: matrices other than embedding and head; no norms, no vectors, no biases."""
    sides = [dim for dim in dims if dim not in ("layers", "experts")]
    return "norm" not in dims and "vocab" not in dims and len(sides) >= 2


def muon_matrix(dims: Dims) -> MuonDimensionNumbers | None:
    """Return which dims of a parameter are rows and columns of its matrices, or None where AdamW takes it.

    Dims `layers`, `experts` and `gate_up` count matrices: each is orthogonalised on its own. Heads and their
    width are one side of the matrix: [embed, heads, head_dim] has columns (heads, head_dim), an output
    projection [heads, head_dim, embed] has rows (heads, head_dim).
    """
    if {"norm", "vocab", "router"} & set(dims):
        return None
    sides = [axis for axis, dim in enumerate(dims) if dim not in _MATRIX_COUNTS]
    if len(sides) < 2:
        return None
    num_rows = 2 if dims[sides[0]] in ("heads", "kv_heads") and len(sides) > 2 else 1
    return MuonDimensionNumbers(tuple(sides[:num_rows]), tuple(sides[num_rows:]))


def _is_dims(x: Any) -> bool:
    return isinstance(x, tuple)


def _is_matrix(x: Any) -> bool:
    return x is None or isinstance(x, MuonDimensionNumbers)


def _muon_rms(matrices: Any) -> optax.GradientTransformation:
    """Scale orthogonal updates to a root mean square of MUON_RMS whatever their shape (arXiv:2502.16982, eq. 4)."""

    def scale(matrix: MuonDimensionNumbers | None, update: jax.Array) -> jax.Array:
        if matrix is None:
            return update
        rows, columns = (math.prod(np.take(update.shape, axes)) for axes in matrix)
        return update * (MUON_RMS * math.sqrt(max(rows, columns)))

    return optax.stateless(lambda updates, _: jax.tree.map(scale, matrices, updates, is_leaf=_is_matrix))


def make_optimizer(config: Config, dims: Any) -> tuple[optax.GradientTransformation, Schedule]:
    """Return the optimizer and its learning-rate schedule.

    Args:
        config: Uses `optimizer` and `train.steps`.
        dims: Nested dict like the parameters; each leaf the tuple of logical dim names of that parameter.

    Returns:
        An Optax transformation whose state has leaves of parameter shape or small replicated ones, and the schedule,
        a function of the number of updates made so far (`state.step - state.skipped`).
    """
    opt, schedule = config.optimizer, make_schedule(config)
    moments = [("moments", optax.scale_by_adam(opt.b1, opt.b2, opt.eps))]
    if opt.name == "muon":
        matrices = jax.tree.map(muon_matrix, dims, is_leaf=_is_dims)
        groups = jax.tree.map(lambda d: "muon" if muon_matrix(d) else "adam", dims, is_leaf=_is_dims)
        muon = scale_by_muon(beta=MUON_MOMENTUM, weight_dimension_numbers=_masked(matrices))
        moments = [
            ("moments", optax.partition({"muon": muon, "adam": moments[0][1]}, groups)),
            ("rms", _muon_rms(matrices)),
        ]
    mask = jax.tree.map(decays, dims, is_leaf=_is_dims)
    chain = optax.named_chain(
        *moments,
        ("decay", optax.add_decayed_weights(opt.weight_decay, mask)),
        ("learning_rate", optax.scale_by_learning_rate(schedule)),
    )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes int32 counts with floats
            return chain.update(updates, state, params)

    return optax.GradientTransformation(chain.init, update), schedule


def _masked(matrices: Any) -> Any:
    """Return `matrices` with Optax's mark where AdamW owns the leaf."""
    return jax.tree.map(lambda m: optax.MaskedNode() if m is None else m, matrices, is_leaf=_is_matrix)


def opt_shardings(optimizer: optax.GradientTransformation, abstract_params: Any, shardings: Any, other: Any) -> Any:
    """Return the shardings of the optimizer's state: of its parameter where a leaf belongs to one, else `other`.

    Args:
        optimizer: As returned by `make_optimizer`.
        abstract_params: Parameters or their shapes.
        shardings: Shardings, a nested dict like the parameters.
        other: Sharding of the remaining leaves (counts and constants), the replicated one.
    """
    abstract_state = jax.eval_shape(optimizer.init, abstract_params)
    return map_like_params(abstract_state, abstract_params, shardings, lambda _: other)
