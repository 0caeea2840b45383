"""The dense projection, as every layer uses it."""

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels import MXWeight, mx_matmul


def linear(x: jax.Array, w: jax.Array | MXWeight, contract: int = 1) -> jax.Array:
    """Contract the last `contract` dims of `x` with the first `contract` dims of `w`: no bias.

    Args:
        x: [..., *K].
        w: [*K, *N]; one in MXFP8 is multiplied in MXFP8.
        contract: Number of dims of K.

    Returns:
        [..., *N] of the type of `x`.
    """
    if x.shape[x.ndim - contract :] != w.shape[:contract]:
        raise ValueError(f"linear: the last {contract} dims of x {x.shape} are not the first of w {w.shape}")
    if isinstance(w, MXWeight):
        return mx_matmul(x, w, contract)
    contracted = tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))
    return lax.dot_general(x, w.astype(jnp.result_type(x, w)), (contracted, ((), ()))).astype(x.dtype)
