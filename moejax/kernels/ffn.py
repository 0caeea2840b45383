"""The feed-forward network of every expert: gather rows, project to gate and up, activate, weight, project down.

One gradient rule on every platform; on GPUs the first half is one kernel, and so is the gradient down to gate and up.
What these kernels do not move, against the composition of their steps, per row in bfloat16: forward writing and
reading the gathered copy (4 D bytes) and reading gate and up again (4 F bytes), backward writing and reading the
gradient of the hidden row (4 F bytes). Kept for backward are `lhs` and its projections: neither the K-fold gathered
copy nor the hidden rows (2 F bytes), which backward makes again from gate and up.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.kernels import dispatch, table
from moejax.kernels.groups import live_rows
from moejax.kernels.kernel import Backends, Kernel
from moejax.kernels.operands import OPERAND_TYPES
from moejax.varying import vary, varying_axes

Activation = Callable[[jax.Array, jax.Array], jax.Array]
"""Elementwise, of gate and up; zeros give zero. Without a gate both are the one projection."""


def expert_ffn(
    lhs: jax.Array,
    up: jax.Array,
    down: jax.Array,
    group_sizes: jax.Array,
    scale: jax.Array | None = None,
    index: jax.Array | None = None,
    *,
    activation: Activation,
    backend: str | Kernel | Backends | None = None,
) -> jax.Array:
    """Each row x through its expert: scale * (activation(x gate, x up) down), where x is lhs[index[i]] for row i.

    What backward reads besides the arguments has the checkpoint name `experts`.
    Rows past sum(group_sizes) are exactly zero and get and give exactly zero gradient, whatever they hold.

    Args:
        lhs: Rows [M, D], or tokens [T, D] with `index`.
        up: [G, D, g, F], gate first; g is 1 without a gate.
        down: [G, F, D], like `up` of the type of `lhs`.
        group_sizes: Rows of each group in order, int32 [G].
        scale: Route weight of each row, float32 [M]; it multiplies the hidden row, so that no pass is needed for it.
        index: Token of each row, int32 [M], within [0, T) for rows in use.
        activation: Computed in float32.
        backend: As in `grouped_matmul`.

    Returns:
        [M, D] of the type of `lhs`.

    Raises:
        ValueError: Shapes that do not fit. TypeError: Types that do not fit.
    """
    _check(lhs, up, down, group_sizes, scale, index)
    num_rows = lhs.shape[0] if index is None else index.shape[0]
    backends = table.backends(backend, lhs.dtype, num_rows, up.shape[0])
    if num_rows == 0 or 0 in up.shape:
        backends = Backends.all("reference")  # nothing to multiply: no kernel runs
    args: Any = (lhs, up, down, group_sizes.astype(jnp.int32), scale, index)
    return _expert_ffn(*vary(args, varying_axes(args)), activation, backends)


def _check(lhs, up, down, group_sizes, scale, index) -> None:
    num_rows = (lhs if index is None else index).shape[:1]
    if (
        lhs.ndim != 2
        or up.ndim != 4
        or up.shape[2] not in (1, 2)
        or (lhs.shape[1], up.shape[0]) != (up.shape[1], *group_sizes.shape)
        or down.shape != (up.shape[0], up.shape[3], lhs.shape[1])
        or any(array is not None and array.shape != num_rows for array in (scale, index))
    ):
        rows = [None if array is None else array.shape for array in (scale, index)]
        shapes = f"{lhs.shape=} {up.shape=} {down.shape=} {group_sizes.shape=}, scale and index {rows}"
        raise ValueError(f"expert_ffn: shapes do not fit: {shapes}")
    same = lhs.dtype == up.dtype == down.dtype and lhs.dtype.name in OPERAND_TYPES
    counts = [array for array in (group_sizes, index) if array is not None]
    counted = all(jnp.issubdtype(array.dtype, jnp.integer) for array in counts)
    if not same or not counted or (scale is not None and scale.dtype != jnp.float32):
        rest = [None if array is None else array.dtype.name for array in (group_sizes, scale, index)]
        types = f"{lhs.dtype=} {up.dtype=} {down.dtype=}, sizes, scale and index {rest}"
        raise TypeError(f"expert_ffn: types do not fit: {types}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _expert_ffn(lhs, up, down, group_sizes, scale, index, activation, backends):
    return _forward(lhs, up, down, group_sizes, scale, index, activation, backends)[0]


def _merged(up: jax.Array) -> jax.Array:
    """[G, D, g, F] to [G, D, g F]: one matmul for gate and up."""
    return up.reshape(*up.shape[:2], up.shape[2] * up.shape[3])


def _source(index: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`index` with the first token for rows that are not in use."""
    return jnp.where(live_rows(group_sizes, index.shape[0]), index, 0)


def _gathered(lhs: jax.Array, index: jax.Array | None, group_sizes: jax.Array) -> jax.Array:
    return lhs if index is None else lhs[_source(index, group_sizes)]


def _hidden(pre: jax.Array, scale: jax.Array | None, activation: Activation, inner: int) -> jax.Array:
    """Hidden rows in float32 from the projections [M, g F]; rows past the sum of sizes may be NaN, which none reads."""
    parts = jnp.split(pre.astype(jnp.float32), inner, axis=-1)
    hidden = activation(parts[0], parts[-1])
    return hidden if scale is None else hidden * scale[:, None]


def _forward(lhs, up, down, group_sizes, scale, index, activation: Activation, backends: Backends):
    kernel = backends.forward
    with jax.named_scope("expert_ffn"):
        if kernel.backend == "gpu":
            from moejax.kernels import gpu_ffn

            hidden, pre = gpu_ffn.hidden_rows(lhs, up, group_sizes, scale, index, activation=activation, kernel=kernel)
            pre = checkpoint_name(pre, "experts")
        else:
            rows = _gathered(lhs, index, group_sizes)
            pre = checkpoint_name(dispatch.gmm(rows, _merged(up), group_sizes, kernel=kernel), "experts")
            hidden = _hidden(pre, scale, activation, up.shape[2])
        out = dispatch.gmm(hidden.astype(lhs.dtype), down, group_sizes, kernel=kernel)
    return out, (lhs, up, down, group_sizes, scale, index, pre)


def _hidden_gradients(
    grad: jax.Array,
    down: jax.Array,
    pre: jax.Array,
    group_sizes: jax.Array,
    scale: jax.Array | None,
    activation: Activation,
    inner: int,
    kernel: Kernel,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Hidden rows once more, and the gradients of the projections and of `scale` from that of the result."""
    if kernel.backend == "gpu":
        from moejax.kernels import gpu_ffn

        return gpu_ffn.hidden_gradients(grad, down, pre, group_sizes, scale, activation=activation, kernel=kernel)
    grad_hidden = dispatch.gmm(grad, down, group_sizes, kernel=kernel, transpose_rhs=True)
    hidden, pullback = jax.vjp(functools.partial(_hidden, activation=activation, inner=inner), pre, scale)
    return hidden.astype(grad.dtype), *pullback(grad_hidden.astype(jnp.float32))


def _backward(activation: Activation, backends: Backends, residuals, grad):
    lhs, up, down, group_sizes, scale, index, pre = residuals
    grad = grad.astype(lhs.dtype)
    with jax.named_scope("expert_ffn_dgrad"):
        hidden, grad_pre, grad_scale = _hidden_gradients(
            grad, down, pre, group_sizes, scale, activation, up.shape[2], backends.dgrad
        )
        grad_lhs = dispatch.gmm(grad_pre, _merged(up), group_sizes, kernel=backends.dgrad, transpose_rhs=True)
    with jax.named_scope("expert_ffn_wgrad"):
        grad_down = dispatch.wgrad(hidden, grad, group_sizes, kernel=backends.wgrad)
        rows = _gathered(lhs, index, group_sizes)
        grad_up = dispatch.wgrad(rows, grad_pre, group_sizes, kernel=backends.wgrad).reshape(up.shape)
    if index is not None:
        total = jnp.zeros_like(lhs, jnp.float32).at[_source(index, group_sizes)].add(grad_lhs.astype(jnp.float32))
        grad_lhs = total.astype(lhs.dtype)
    return grad_lhs, grad_up, grad_down, None, grad_scale, None


_expert_ffn.defvjp(_forward, _backward)
