"""The routed experts: two grouped matmuls around SwiGLU."""

import jax

from moejax.kernels import grouped_matmul


def experts(rows_RD: jax.Array, sizes_e: jax.Array, gate_up_eD2F: jax.Array, down_eFD: jax.Array) -> jax.Array:
    """Expert FFNs `(silu(x W_gate) * x W_up) W_down`.

    Args:
        rows_RD: Rows, expert after expert.
        sizes_e: Rows of each expert.
        gate_up_eD2F: Gate and up weights side by side, [e, D, 2, F].
        down_eFD: Down weights.

    Returns:
        [R, D]; rows past the sum of sizes are zero.
    """
    width = gate_up_eD2F.shape[-1]
    hidden = grouped_matmul(rows_RD, gate_up_eD2F.reshape(*gate_up_eD2F.shape[:2], 2 * width), sizes_e)
    return grouped_matmul(jax.nn.silu(hidden[:, :width]) * hidden[:, width:], down_eFD, sizes_e)
