"""What every backend is given: the operands of one product or weight gradient, and their sizes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from moejax.varying import varying_axes

OPERAND_TYPES = frozenset(("float32", "bfloat16", "float16"))
"""Types that every backend multiplies, but for `mosaic`."""


class Product(NamedTuple):
    """Rows of lhs [M, K] times their group's matrix; rows past the sum of sizes give zeros.

    Attributes:
        lhs: [M, K].
        rhs: [G, K, N], or [G, N, K] with `transpose_rhs`.
        group_sizes: int32 [G].
        transpose_rhs: Whether the contraction is over the last dim of `rhs`.
        out_dtype: Type of the result [M, N]; sums are float32 and rounded once.
    """

    lhs: jax.Array
    rhs: jax.Array
    group_sizes: jax.Array
    transpose_rhs: bool
    out_dtype: DTypeLike

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """M, K, N, G."""
        (m, k), groups, n = self.lhs.shape, self.rhs.shape[0], self.rhs.shape[1 if self.transpose_rhs else 2]
        return m, k, n, groups

    @property
    def axes(self) -> frozenset[str]:
        """Mesh axes over which the result varies."""
        return varying_axes(self.lhs, self.rhs, self.group_sizes)


class WeightGradient(NamedTuple):
    """Sum of lhs[row]^T grad[row] over each group's rows; zero for groups without rows.

    Attributes:
        lhs: [M, K].
        grad: [M, N].
        group_sizes: int32 [G].
        out_dtype: Type of the result [G, K, N]; sums are float32 and rounded once.
        accumulator: float32 [G, K, N] to which the sums are added, or None. With it the result is float32.
    """

    lhs: jax.Array
    grad: jax.Array
    group_sizes: jax.Array
    out_dtype: DTypeLike
    accumulator: jax.Array | None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """M, K, N, G."""
        (m, k), n, groups = self.lhs.shape, self.grad.shape[1], self.group_sizes.shape[0]
        return m, k, n, groups

    @property
    def axes(self) -> frozenset[str]:
        """Mesh axes over which the result varies."""
        return varying_axes(self.lhs, self.grad, self.group_sizes)

    def result(self, total: jax.Array) -> jax.Array:
        """The result from float32 sums that do not hold the accumulator yet."""
        return total.astype(self.out_dtype) if self.accumulator is None else self.accumulator + total


def precision(dtype: DTypeLike) -> lax.Precision | None:
    """Full float32 products of float32 operands: GPUs and TPUs round them by default."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None
