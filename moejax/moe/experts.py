"""The routed experts: two grouped matmuls around an activation.

The routing weight multiplies the hidden row, not the result: the second matmul is linear, so the result is
the same, and the weight's gradient <dY W2^T, A> needs no expert output. Rows leave the experts weighted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.kernels import MXWeight, expert_ffn, grouped_matmul, mx_grouped_matmul
from moejax.nn.activations import ACTIVATIONS, activate


class ExpertWeights(NamedTuple):
    """Weights of the local experts; the matrices may be in MXFP8.

    Attributes:
        gate_up: [e, D, g, F], gate and up side by side; g is 1 without a gate.
        down: [e, F, D].
        gate_up_bias: [e, g * F], gate first, or None.
        down_bias: [e, D], or None.
    """

    gate_up: jax.Array | MXWeight
    down: jax.Array | MXWeight
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


def experts(
    rows_RD: jax.Array,
    weight_R: jax.Array,
    sizes_e: jax.Array,
    weights: ExpertWeights,
    activation: str,
    weight_on_input: bool,
) -> jax.Array:
    """Weighted expert results `weight * FFN(row)`, or `FFN(weight * row)` with `weight_on_input`.

    Args:
        rows_RD: Rows, expert after expert; those past the sum of sizes may hold anything.
        weight_R: Routing weight of each row, float32.
        sizes_e: Rows of each expert.
        weights: Weights of the local experts.
        activation: As `moejax.nn.activations.activate`.
        weight_on_input: Where the routing weight goes.

    Returns:
        [R, D]; rows past the sum of sizes are zero.
    """
    weight = None if weight_on_input else weight_R
    if weight_on_input:
        rows_RD = _weighted(rows_RD, weight_R)
    up, down = weights.gate_up, weights.down
    if weights.gate_up_bias is not None or isinstance(up, MXWeight) or isinstance(down, MXWeight):
        out = _product(_hidden(rows_RD, weight, sizes_e, weights, activation), down, sizes_e)
    else:
        out = expert_ffn(rows_RD, up, down, sizes_e, weight, activation=ACTIVATIONS[activation])
    if weights.down_bias is not None:
        out = out + _down_bias(weights.down_bias, weight, sizes_e, out.shape[0])
    return out


def _hidden(
    rows_RD: jax.Array, weight_R: jax.Array | None, sizes_e: jax.Array, weights: ExpertWeights, activation: str
) -> jax.Array:
    """Activated hidden rows [R, F], times `weight` if given; matrices may be in MXFP8, and there may be biases."""
    hidden = _product(rows_RD, weights.gate_up, sizes_e)
    if weights.gate_up_bias is not None:
        hidden = hidden + _of_rows(weights.gate_up_bias, sizes_e, hidden.shape[0])
    hidden = checkpoint_name(hidden, "experts")
    hidden = activate(hidden.reshape(-1, *weights.gate_up.shape[2:]), activation)
    return hidden if weight_R is None else _weighted(hidden, weight_R)


def _down_bias(bias_eD: jax.Array, weight_R: jax.Array | None, sizes_e: jax.Array, rows: int) -> jax.Array:
    """Each row's bias, times `weight` if given. Backward makes it again: it is as large as the results of experts."""
    if weight_R is None:
        return _of_rows(bias_eD, sizes_e, rows)
    weight_R = jnp.where(jnp.arange(rows) < jnp.sum(sizes_e), weight_R, 0.0)
    return jax.checkpoint(lambda bias, weight: _weighted(_of_rows(bias, sizes_e, rows), weight))(bias_eD, weight_R)


def _product(rows_RK: jax.Array, weight: jax.Array | MXWeight, sizes_e: jax.Array) -> jax.Array:
    """Rows times the matrix [K, *N] of their expert, [R, N]."""
    if isinstance(weight, MXWeight):
        return mx_grouped_matmul(rows_RK, weight, sizes_e)
    return grouped_matmul(rows_RK, weight.reshape(*weight.shape[:2], -1), sizes_e)


def _weighted(rows_RX: jax.Array, weight_R: jax.Array) -> jax.Array:
    """Rows times float32 weights, in the type of the rows."""
    return (rows_RX.astype(jnp.float32) * weight_R[:, None]).astype(rows_RX.dtype)


def _of_rows(bias_eN: jax.Array, sizes_e: jax.Array, rows: int) -> jax.Array:
    """Each row's bias, zero past the sum of sizes: a grouped matmul with a column of ones, whose gradient sums rows."""
    return grouped_matmul(jnp.ones((rows, 1), bias_eN.dtype), bias_eN[:, None], sizes_e)
