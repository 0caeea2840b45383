"""AdamW, Muon and the schedules against NumPy in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Config, OptimizerConfig, TrainConfig
from moejax.train.optimizer import MUON_MOMENTUM, decays, make_optimizer, make_schedule, muon_matrix, opt_shardings
from moejax.train.state import from_dict, named_leaves, to_dict

DIMS = {
    "embed": {"table": ("vocab", "embed")},
    "groups_0": {
        "query": ("layers", "embed", "heads", "head_dim"),
        "out": ("layers", "heads", "head_dim", "embed"),
        "router": ("layers", "embed", "router"),
        "up": ("layers", "experts", "expert_embed", "expert_mlp"),
        "gate_up": ("layers", "experts", "expert_embed", "gate_up", "expert_mlp"),
        "norm": ("layers", "norm"),
    },
    "head": {"kernel": ("embed", "vocab")},
}
SIZES = {"vocab": 11, "embed": 6, "layers": 2, "heads": 2, "head_dim": 4, "router": 3, "experts": 3, "expert_embed": 6}
SIZES |= {"expert_mlp": 5, "norm": 6, "gate_up": 2}
NO_DECAY = {("embed", "table"), ("groups_0", "norm"), ("head", "kernel")}
ADAM_WITH_MUON = NO_DECAY | {("groups_0", "router")}


def _config(**options):
    steps = options.pop("steps", 50)
    return Config(train=TrainConfig(steps=steps), optimizer=OptimizerConfig(**options))


def _tree(seed: int, scale: float):
    rng = np.random.default_rng(seed)
    shapes = jax.tree.map(lambda dims: tuple(SIZES[dim] for dim in dims), DIMS, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.map(
        lambda s: (scale * rng.standard_normal(s)).astype(np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def _run(config: Config, steps: int):
    """Return parameters after `steps` updates, by name, and the gradients that were fed."""
    optimizer, _ = make_optimizer(config, DIMS)
    params = jax.tree.map(jnp.asarray, _tree(0, 0.5))
    grads = [_tree(100 + i, 0.1 * (i + 1)) for i in range(steps)]
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for grad in grads:
        updates, state = update(jax.tree.map(jnp.asarray, grad), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return dict(named_leaves(params)), grads


def _rate(config: Config, n: int) -> float:
    """The documented learning rate of update n, counted from 1."""
    opt, total = config.optimizer, config.train.steps
    warmup = opt.warmup_steps
    if n <= warmup:
        return opt.learning_rate * n / warmup
    if opt.schedule == "constant":
        return opt.learning_rate
    if opt.schedule == "cosine":
        t = min(1.0, (n - warmup) / (total - warmup))
        return opt.learning_rate * (opt.final_ratio + (1 - opt.final_ratio) * (1 + math.cos(math.pi * t)) / 2)
    start = max(warmup, total - round(opt.decay_fraction * total))
    t = min(1.0, max(0.0, (n - start) / (total - start)))
    return opt.learning_rate * (1 - (1 - opt.final_ratio) * t)


def _adamw(names, p, grads, config: Config) -> np.ndarray:
    opt = config.optimizer
    p, m, v = p.astype(np.float64), 0.0, 0.0
    for n, grad in enumerate(grads, 1):
        g = dict(named_leaves(grad))[names].astype(np.float64)
        m, v = opt.b1 * m + (1 - opt.b1) * g, opt.b2 * v + (1 - opt.b2) * g * g
        direction = (m / (1 - opt.b1**n)) / (np.sqrt(v / (1 - opt.b2**n)) + opt.eps)
        decay = 0.0 if names in NO_DECAY else opt.weight_decay
        p = p - _rate(config, n) * (direction + decay * p)
    return p


def _newton_schulz(x: np.ndarray) -> np.ndarray:
    """Five quintic steps on one matrix [rows, columns], as published with Muon."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x.T if x.shape[0] > x.shape[1] else x
    wide = wide / (np.linalg.norm(wide) + 1e-8)
    for _ in range(5):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.T if x.shape[0] > x.shape[1] else wide


def _matrices(names, x: np.ndarray) -> np.ndarray:
    """View a leaf as [matrices, rows, columns], written out per leaf."""
    match names[-1]:
        case "query":
            return x.reshape(2, 6, 2 * 4)
        case "out":
            return x.reshape(2, 2 * 4, 6)
        case "up":
            return x.reshape(2 * 3, 6, 5)
        case "gate_up":
            return x.transpose(0, 1, 3, 2, 4).reshape(2 * 3 * 2, 6, 5)
    raise AssertionError(names)


def _muon(names, p, grads, config: Config) -> np.ndarray:
    """Parameters as [matrices, rows, columns] after Muon with Nesterov momentum and bias correction."""
    beta, m = MUON_MOMENTUM, 0.0
    p = _matrices(names, p.astype(np.float64))
    for n, grad in enumerate(grads, 1):
        g = _matrices(names, dict(named_leaves(grad))[names].astype(np.float64))
        m = beta * m + (1 - beta) * g
        mixed = beta * m / (1 - beta ** (n + 1)) + (1 - beta) * g / (1 - beta**n)
        direction = np.stack([_newton_schulz(matrix) for matrix in mixed]) * 0.2 * math.sqrt(max(p.shape[1:]))
        p = p - _rate(config, n) * (direction + config.optimizer.weight_decay * p)
    return p


def test_adamw_equals_numpy():
    config = _config(name="adamw", warmup_steps=3, learning_rate=0.02, weight_decay=0.3)
    got, grads = _run(config, 5)
    for names, p in named_leaves(_tree(0, 0.5)):
        np.testing.assert_allclose(
            got[names], _adamw(names, p, grads, config), rtol=2e-5, atol=2e-6, err_msg=str(names)
        )


def test_muon_equals_numpy_for_every_matrix_on_its_own():
    config = _config(name="muon", warmup_steps=3, learning_rate=0.02, weight_decay=0.3)
    got, grads = _run(config, 4)
    for names, p in named_leaves(_tree(0, 0.5)):
        if names in ADAM_WITH_MUON:
            want = _adamw(names, p, grads, config)
            np.testing.assert_allclose(got[names], want, rtol=2e-5, atol=2e-6, err_msg=str(names))
        else:
            have = _matrices(names, np.asarray(got[names]))
            np.testing.assert_allclose(have, _muon(names, p, grads, config), rtol=1e-4, atol=2e-6, err_msg=str(names))


def test_an_expert_without_gradient_moves_by_decay_alone():
    config = _config(name="muon", warmup_steps=0, schedule="constant", learning_rate=0.1, weight_decay=0.5)
    optimizer, _ = make_optimizer(config, DIMS)
    params, grads = jax.tree.map(jnp.asarray, _tree(0, 0.5)), _tree(1, 0.1)
    grads["groups_0"]["up"][0, 1] = 0.0
    updates, _ = jax.jit(optimizer.update)(jax.tree.map(jnp.asarray, grads), optimizer.init(params), params)
    up, before = updates["groups_0"]["up"], params["groups_0"]["up"]
    np.testing.assert_allclose(up[0, 1], -0.1 * 0.5 * before[0, 1], rtol=1e-6)
    assert np.abs(np.asarray(up[0, 0] + 0.05 * before[0, 0])).min() > 1e-5


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 10), (4, 10), (7, 40), (20, 10)])
def test_schedule_is_the_documented_one(schedule, warmup, total):
    config = _config(schedule=schedule, warmup_steps=warmup, steps=total, decay_fraction=0.3, learning_rate=0.7)
    rate = make_schedule(config)
    for updates in range(total + 3):
        if updates < total or warmup < total:
            want = _rate(config, updates + 1)
            np.testing.assert_allclose(rate(jnp.int32(updates)), want, rtol=1e-5, err_msg=f"update {updates + 1}")


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_schedule_ends_exactly_at_the_final_ratio(schedule):
    config = _config(schedule=schedule, warmup_steps=5, steps=20, final_ratio=0.25, learning_rate=1.0)
    rate = make_schedule(config)
    assert float(rate(4)) == 1.0
    np.testing.assert_allclose(rate(19), 0.25, rtol=1e-6)
    np.testing.assert_allclose(rate(500), 0.25, rtol=1e-6)


def test_groups_follow_from_dims():
    assert decays(("layers", "embed", "router"))
    undecayed = [("layers", "norm"), ("vocab", "embed"), ("layers", "mlp"), ("layers", "experts", "expert_mlp")]
    assert not any(decays(dims) for dims in undecayed)
    assert muon_matrix(("layers", "norm")) is None
    assert muon_matrix(("vocab", "embed")) is None
    assert muon_matrix(("layers", "embed", "router")) is None
    assert muon_matrix(("layers", "embed", "kv_heads", "head_dim")) == ((1,), (2, 3))
    assert muon_matrix(("layers", "heads", "head_dim", "embed")) == ((1, 2), (3,))
    assert muon_matrix(("layers", "experts", "expert_mlp", "expert_embed")) == ((2,), (3,))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizer_state_is_sharded_like_its_parameters(name):
    optimizer, _ = make_optimizer(_config(name=name), DIMS)
    params = _tree(0, 1.0)
    marks = jax.tree_util.tree_map_with_path(lambda path, _: "/".join(k.key for k in path), params)
    state = to_dict(opt_shardings(optimizer, params, marks, "replicated"))
    leaves = {"/".join(names): leaf for names, leaf in named_leaves(state)}
    shapes = {"/".join(names): leaf.shape for names, leaf in named_leaves(jax.eval_shape(optimizer.init, params))}
    for key, mark in leaves.items():
        if mark == "replicated":
            assert math.prod(shapes[key]) <= 3, key
        else:
            assert key.endswith(mark), key
    want = len(jax.tree.leaves(params)) * 2 - (4 if name == "muon" else 0)  # Muon keeps one moment for its four leaves
    assert sum(mark != "replicated" for mark in leaves.values()) == want


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_survives_its_form_on_disk(name):
    optimizer, _ = make_optimizer(_config(name=name), DIMS)
    state = optimizer.init(_tree(3, 1.0))
    marked = jax.tree.unflatten(jax.tree.structure(state), range(len(jax.tree.leaves(state))))
    values = to_dict(marked)
    assert {type(node) for node in _nodes(values)} == {dict}
    assert jax.tree.leaves(from_dict(values, state)) == jax.tree.leaves(marked)


def _nodes(tree):
    if isinstance(tree, dict):
        yield tree
        for child in tree.values():
            yield from _nodes(child)
