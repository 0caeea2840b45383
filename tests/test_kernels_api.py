"""The public function: arguments that do not fit, types of results, transposed weights, vmap, and no rows at all."""

import jax
import jax.numpy as jnp
import kernels_oracle as oracle
import numpy as np
import pytest

from moejax.errors import UserError
from moejax.kernels import Backends, Kernel, dispatch, expert_ffn, grouped_matmul, grouped_wgrad

LHS, RHS, SIZES = jnp.ones((6, 4)), jnp.ones((2, 4, 3)), jnp.array([2, 3])


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ValueError, (LHS[0], RHS, SIZES)),
        (ValueError, (LHS, RHS[0], SIZES)),
        (ValueError, (LHS[:, :3], RHS, SIZES)),
        (ValueError, (LHS, RHS, SIZES[:1])),
        (TypeError, (LHS.astype(jnp.bfloat16), RHS, SIZES)),
        (TypeError, (LHS, RHS, SIZES.astype(jnp.float32))),
        (TypeError, (LHS.astype(jnp.int32), RHS.astype(jnp.int32), SIZES)),
        (TypeError, (LHS.astype(jnp.float8_e4m3fn), RHS.astype(jnp.float8_e4m3fn), SIZES)),
    ],
)
def test_arguments_that_do_not_fit(error, arguments):
    with pytest.raises(error, match="do not fit"):
        grouped_matmul(*arguments)


def test_types_of_results_that_do_not_fit():
    with pytest.raises(TypeError, match="do not fit.*preferred_element_type=int32"):
        grouped_matmul(LHS, RHS, SIZES, preferred_element_type=jnp.int32)


def test_backends_that_do_not_exist_or_run_here():
    with pytest.raises(UserError, match="did you mean 'reference'"):
        grouped_matmul(LHS, RHS, SIZES, backend="referense")
    with pytest.raises(UserError, match="backend 3: must be a name, a Kernel or Backends"):
        grouped_matmul(LHS, RHS, SIZES, backend=3)  # type: ignore[arg-type]
    for backend in ("gpu", "tpu"):
        with pytest.raises(UserError, match=f"backend {backend}: does not run on cpu"):
            grouped_matmul(LHS, RHS, SIZES, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "cpu", "xla", "padded", "gpu", "tpu"])
def test_wrong_accumulators(backend):
    kernel = Kernel(backend, interpret=backend in ("gpu", "tpu"))
    with pytest.raises(TypeError, match="must be float32"):
        dispatch.wgrad(LHS, LHS, SIZES, kernel=kernel, accumulator=jnp.zeros((2, 4, 4), jnp.bfloat16))
    for shape in ((3, 4, 4), (2, 4, 3), (4, 4)):
        with pytest.raises(ValueError, match="wgrad: shapes do not fit"):
            dispatch.wgrad(LHS, LHS, SIZES, kernel=kernel, accumulator=jnp.zeros(shape))
    with pytest.raises(ValueError, match="wgrad: shapes do not fit"):
        dispatch.wgrad(LHS, LHS[:5], SIZES, kernel=kernel)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_gradients_of_microbatches_are_summed_in_float32(dtype):
    """By the table's kernel, into the caller's donated memory; alone it is that of `grouped_matmul`."""
    rng = np.random.default_rng(3)
    sizes = np.array([[9, 0, 20], [0, 11, 3]], np.int32)
    lhs, grad = (oracle.round_to(rng.standard_normal(s), dtype) for s in ((2, 30, 8), (2, 30, 5)))
    add = jax.jit(lambda x, dy, sizes, total: grouped_wgrad(x, dy, sizes, accumulator=total), donate_argnums=3)
    total = jnp.zeros((3, 8, 5))
    for part in range(2):
        before = total
        total = add(lhs[part], grad[part], sizes[part], total)
        assert before.is_deleted()
    want = np.sum([oracle.wgrad(lhs[i], grad[i], sizes[i]) for i in range(2)], axis=0)
    assert total.dtype == jnp.float32
    assert max(map(oracle.relative_error, total, want)) < 1e-6
    one = jnp.asarray(sizes[0])
    _, pullback = jax.vjp(lambda w: grouped_matmul(jnp.asarray(lhs[0]), w, one), jnp.ones((3, 8, 5), dtype))
    alone = grouped_wgrad(jnp.asarray(lhs[0]), jnp.asarray(grad[0]), one)
    np.testing.assert_array_equal(alone, pullback(jnp.asarray(grad[0]))[0])


def test_weight_gradients_that_do_not_fit():
    for error, arguments in (
        (ValueError, (LHS, LHS[0], SIZES)),
        (ValueError, (LHS, LHS[:5], SIZES)),
        (TypeError, (LHS, LHS.astype(jnp.bfloat16), SIZES)),
        (TypeError, (LHS.astype(jnp.int32), LHS.astype(jnp.int32), SIZES)),
        (TypeError, (LHS, LHS, SIZES.astype(jnp.float32))),
    ):
        with pytest.raises(error, match="do not fit"):
            grouped_wgrad(*arguments)


@pytest.mark.parametrize("backend", ["reference", "cpu", "xla", "padded", "gpu", "tpu"])
@pytest.mark.parametrize("shape", [(0, 4, 3, 2), (5, 0, 3, 2), (5, 4, 0, 2), (5, 4, 3, 0)], ids=str)
def test_dims_of_no_length(backend, shape):
    """M, K, N or G is zero: results and gradients have their shapes and are zero."""
    m, k, n, groups = shape
    kernel = Kernel(backend, interpret=backend in ("gpu", "tpu"))
    sizes = jnp.full(groups, min(m, 1), jnp.int32)
    out, pullback = jax.vjp(
        lambda x, w: grouped_matmul(x, w, sizes, backend=kernel), jnp.ones((m, k)), jnp.ones((groups, k, n))
    )
    got = out, *pullback(jnp.ones_like(out))
    assert [a.shape for a in got] == [(m, n), (m, k), (groups, k, n)]
    assert all((np.asarray(a) == 0).all() for a in got)
    if k and groups:
        old = jnp.ones((groups, k, n))
        total = dispatch.wgrad(jnp.ones((m, k)), jnp.ones((m, n)), 0 * sizes, kernel=kernel, accumulator=old)
        np.testing.assert_array_equal(total, old)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize(("m", "d", "f", "groups"), [(0, 4, 3, 2), (5, 4, 0, 2), (5, 4, 3, 0)])
def test_expert_ffn_of_no_length(backend, m, d, f, groups):
    kernel = Kernel(backend, interpret=backend == "gpu")
    sizes = jnp.full(groups, min(m, 1), jnp.int32)
    args = jnp.ones((m, d)), jnp.ones((groups, d, 2, f)), jnp.ones((groups, f, d)), jnp.ones(m)

    def ffn(x, up, down, scale):
        return expert_ffn(x, up, down, sizes, scale, activation=lambda gate, up: gate * up, backend=kernel)

    out, pullback = jax.vjp(ffn, *args)
    got = pullback(jnp.ones_like(out))
    assert [a.shape for a in got] == [a.shape for a in args]
    assert out.shape == (m, d)
    assert all((np.asarray(a) == 0).all() for a in (out, *got))


def test_directions_can_differ_and_types_are_kept():
    rng = np.random.default_rng(0)
    sizes = np.array([20, 0, 33], np.int32)
    lhs, rhs = (oracle.round_to(rng.standard_normal(s), "bfloat16") for s in ((60, 24), (3, 16, 24)))
    grad = rng.standard_normal((60, 16)).astype(np.float32)

    @jax.jit
    def run(lhs, rhs, grad):
        def product(lhs, rhs):
            backends = Backends(Kernel("cpu"), Kernel("padded", max_group_size=33), Kernel("xla"))
            return grouped_matmul(
                lhs, rhs, jnp.asarray(sizes), backend=backends, transpose_rhs=True, preferred_element_type=jnp.float32
            )

        out, pullback = jax.vjp(product, lhs, rhs)
        return out, *pullback(grad)

    out, grad_lhs, grad_rhs = run(lhs, rhs, grad)
    assert (out.dtype, grad_lhs.dtype, grad_rhs.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    rounded = oracle.round_to(grad, "bfloat16")
    assert oracle.worst_row_group(out, oracle.gmm(lhs, rhs.swapaxes(1, 2), sizes), sizes) < 1e-6
    assert oracle.worst_row_group(grad_lhs, oracle.gmm(rounded, rhs, sizes), sizes) < 4e-3
    assert oracle.worst_weight_group(grad_rhs, oracle.wgrad(rounded, lhs, sizes), sizes) < 4e-3


@pytest.mark.parametrize("backend", ["cpu", "xla", "padded", "reference", "gpu", "tpu"])
def test_float16(backend):
    rng = np.random.default_rng(2)
    sizes = np.array([11, 0, 30], np.int32)
    lhs, rhs = (rng.standard_normal(s).astype(np.float16) for s in ((50, 12), (3, 12, 7)))
    kernel = Kernel(backend, interpret=backend in ("gpu", "tpu"))
    out, pullback = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, jnp.asarray(sizes), backend=kernel), lhs, rhs)
    grad_lhs, grad_rhs = pullback(out)
    grad = np.asarray(out)
    assert oracle.worst_row_group(grad, oracle.gmm(lhs, rhs, sizes), sizes) < 5e-4
    assert oracle.worst_row_group(grad_lhs, oracle.gmm(grad, rhs.swapaxes(1, 2), sizes), sizes) < 5e-4
    assert oracle.worst_weight_group(grad_rhs, oracle.wgrad(lhs, grad, sizes), sizes) < 5e-4


@pytest.mark.parametrize("backend", ["reference", "xla", "padded", "gpu", "tpu"])
def test_float32_is_multiplied_as_float32(backend):
    """GPUs and TPUs round float32 operands unless they are told not to; a CPU does not show it."""
    kernel = Kernel(backend, interpret=backend in ("gpu", "tpu"))

    def products(lhs, rhs):
        return jax.vjp(lambda x, w: grouped_matmul(x, w, SIZES, backend=kernel), lhs, rhs)[1](jnp.ones((6, 3)))

    names = ("dot_general[", "ragged_dot_general[")
    lines = [line for line in str(jax.make_jaxpr(products)(LHS, RHS)).split("= ") if line.startswith(names)]
    assert len(lines) >= 2
    for line in lines:
        assert "Precision.HIGHEST" in line.partition("] ")[0], line


def test_padded_drops_rows_beyond_its_bound():
    lhs, rhs = jnp.ones((6, 4)), jnp.ones((2, 4, 3))
    out = grouped_matmul(lhs, rhs, jnp.array([4, 2]), backend=Kernel("padded", max_group_size=3))
    np.testing.assert_array_equal(out[:, 0], [4, 4, 4, 0, 4, 4])


@pytest.mark.parametrize("backend", ["cpu", "xla", "padded", "reference"])
def test_vmap_and_no_rows(backend):
    rng = np.random.default_rng(1)
    lhs = rng.standard_normal((2, 20, 8)).astype(np.float32)
    rhs = rng.standard_normal((2, 3, 8, 5)).astype(np.float32)
    sizes = np.array([[5, 0, 12], [1, 19, 0]], np.int32)

    def loss(lhs, rhs, sizes):
        return jnp.sum(grouped_matmul(lhs, rhs, sizes, backend=backend) ** 2)

    got = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1))))(lhs, rhs, sizes)
    for i in range(2):
        grad = 2 * oracle.gmm(lhs[i], rhs[i], sizes[i])
        want = oracle.gmm(grad, rhs[i].swapaxes(1, 2), sizes[i])
        assert oracle.worst_row_group(got[0][i], want, sizes[i]) < 1e-6
        assert oracle.worst_weight_group(got[1][i], oracle.wgrad(lhs[i], grad, sizes[i]), sizes[i]) < 1e-6
    grads = jax.grad(loss, argnums=(0, 1))(lhs[0, :0], rhs[0], np.zeros(3, np.int32))
    assert grads[0].shape == (0, 8)
    assert (np.asarray(grads[1]) == 0).all()


def test_cpu_multiplies_one_group_in_its_loops_alone():
    """A list of one window is the same in every turn: XLA would take the products of all sizes out of their loops."""
    x, dy, sizes = jnp.ones((600, 8)), jnp.ones((600, 4)), jnp.array([600], jnp.int32)
    compiled = jax.jit(lambda x, dy, sizes: dispatch.wgrad(x, dy, sizes, kernel=Kernel("cpu"))).lower(x, dy, sizes)
    text = compiled.compile().as_text() or ""
    entry = text[text.index("ENTRY") :]
    assert "dot_general" in text
    assert " while(" in entry
    assert "dot_general" not in entry
