"""The first half of a SwiGLU expert: gather rows, project to gate and up, activate, multiply by the route weight.

One fused kernel on GPUs, a composition of the same steps elsewhere; one gradient rule for both. What the fused
kernel does not move, against the composition, per row in bfloat16: writing and reading the gathered copy (4 K
bytes), reading gate and up again (4 F bytes). The residual is `lhs`, not its K-fold gathered copy.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.kernels import dispatch, table
from moejax.kernels.groups import live_rows
from moejax.kernels.kernel import Backends, Kernel
from moejax.varying import vary, varying_axes


def gated_matmul(
    lhs: jax.Array,
    gate_up: jax.Array,
    group_sizes: jax.Array,
    scale: jax.Array | None = None,
    index: jax.Array | None = None,
    *,
    backend: str | Kernel | Backends | None = None,
) -> jax.Array:
    """silu(x gate) * (x up) * scale, where row i of x is lhs[index[i]].

    What backward reads besides `lhs` has the checkpoint name `experts`.
    Rows past sum(group_sizes) are exactly zero and get and give exactly zero gradient, whatever they hold.

    Args:
        lhs: Rows [M, K], or tokens [T, K] with `index`.
        gate_up: [G, K, 2 F], gate first, of the type of `lhs`.
        group_sizes: Rows of each group in order, int32 [G].
        scale: Route weight of each row, float32 [M]; it multiplies the hidden row, so that the following
            matmul needs no pass of its own for it.
        index: Token of each row, int32 [M], within [0, T) for rows in use.
        backend: As in `grouped_matmul`.

    Returns:
        [M, F] of the type of `lhs`.
    """
    if lhs.ndim != 2 or gate_up.ndim != 3 or lhs.shape[1] != gate_up.shape[1] or gate_up.shape[2] % 2:
        raise ValueError(f"gated_matmul: shapes do not fit: {lhs.shape=} {gate_up.shape=}")
    num_rows = lhs.shape[0] if index is None else index.shape[0]
    backends = table.backends(backend, lhs.dtype, num_rows, gate_up.shape[0])
    args = (lhs, gate_up, group_sizes.astype(jnp.int32), scale, index)
    return _gated_matmul(*vary(args, varying_axes(args)), backends)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _gated_matmul(lhs, gate_up, group_sizes, scale, index, backends):
    return _forward(lhs, gate_up, group_sizes, scale, index, backends)[0]


def _source(index: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`index` with the first token for rows that are not in use."""
    return jnp.where(live_rows(group_sizes, index.shape[0]), index, 0)


def _forward(lhs, gate_up, group_sizes, scale, index, backends):
    kernel = backends.forward
    with jax.named_scope("gated_matmul"):
        if kernel.backend == "gpu":
            from moejax.kernels.gpu_gated import gated

            both = gated(lhs, gate_up, group_sizes, scale, index, kernel=kernel)
            hidden, pre = checkpoint_name(both, "experts")  # one without the other would run the kernel again
        else:
            rows = lhs if index is None else lhs[_source(index, group_sizes)]
            pre = checkpoint_name(dispatch.gmm(rows, gate_up, group_sizes, kernel=kernel), "experts")
            hidden = _activate(pre, _live_scale(scale, group_sizes, pre.shape[0])).astype(lhs.dtype)
    return hidden, (lhs, gate_up, group_sizes, scale, index, pre)


def _live_scale(scale: jax.Array | None, group_sizes: jax.Array, num_rows: int) -> jax.Array | None:
    return None if scale is None else jnp.where(live_rows(group_sizes, num_rows), scale.astype(jnp.float32), 0.0)


def _activate(pre: jax.Array, scale: jax.Array | None) -> jax.Array:
    gate, up = jnp.split(pre.astype(jnp.float32), 2, axis=-1)
    hidden = jax.nn.silu(gate) * up
    return hidden if scale is None else hidden * scale[:, None]


def _backward(backends, residuals, grad):
    lhs, gate_up, group_sizes, scale, index, pre = residuals
    live = live_rows(group_sizes, pre.shape[0])
    grad = jnp.where(live[:, None], grad.astype(jnp.float32), 0.0)
    _, pullback = jax.vjp(_activate, pre, _live_scale(scale, group_sizes, pre.shape[0]))
    grad_pre, grad_scale = pullback(grad)
    if scale is not None:
        grad_scale = grad_scale.astype(scale.dtype)
    grad_rows = dispatch.gmm(grad_pre, gate_up, group_sizes, kernel=backends.dgrad, transpose_rhs=True)
    rows = lhs if index is None else lhs[_source(index, group_sizes)]
    grad_gate_up = dispatch.wgrad(rows, grad_pre, group_sizes, kernel=backends.wgrad, out_dtype=gate_up.dtype)
    if index is None:
        return grad_rows, grad_gate_up, None, grad_scale, None
    total = jnp.zeros_like(lhs, jnp.float32).at[_source(index, group_sizes)].add(grad_rows.astype(jnp.float32))
    return total.astype(lhs.dtype), grad_gate_up, None, grad_scale, None


_gated_matmul.defvjp(_forward, _backward)
