"""Forms of the layer against NumPy: shared expert, gain and gate, latent experts, biases, dense branch; refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from moejax.config import (
    Config,
    DataConfig,
    LayerGroup,
    LayerSpec,
    LogConfig,
    LossConfig,
    MeshConfig,
    MoEConfig,
    MoEModelConfig,
)
from moejax.errors import UserError
from moejax.model.block import MLP, Block, MoE, Tokens
from moejax.model.parameters import Abstract
from moejax.moe.experts import ExpertWeights, experts

B, S, D = 2, 5, 32


def silu(x):
    return x / (1 + np.exp(-x))


def norm(x, scale, eps=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def bound(module, seed: int = 0):
    """Module with random weights, and the weights in float64."""
    abstract, rng = Abstract(module), np.random.default_rng(seed)
    weights = jax.tree.map(lambda s: rng.standard_normal(s.shape).astype(np.float32) / 4, abstract.shapes)
    return abstract.bind(jax.tree.map(jnp.asarray, weights)), jax.tree.map(np.float64, weights)


def tokens() -> tuple[np.ndarray, Tokens]:
    segments = np.ones((B, S), np.int32)
    segments[1, 3:] = 0
    x = np.random.default_rng(1).standard_normal((B, S, D)).astype(np.float32)
    return x, Tokens(jnp.asarray(segments), jnp.tile(jnp.arange(S), (B, 1)))


def run_of(moe: MoEModelConfig) -> Config:
    return tiny.config(model=dataclasses.replace(tiny.MODEL, moe=moe))


def numpy_moe(x, w, m: MoEModelConfig):
    """One token at a time; relu2 without gate, or swiglu."""
    out = np.zeros(x.shape)
    for place in np.ndindex(x.shape[:2]):
        row = x[place].astype(np.float64)
        z = row @ w["router"]
        score = 1 / (1 + np.exp(-z)) if m.scores == "sigmoid" else np.exp(z) / np.exp(z).sum()
        chosen = np.argsort(-score, kind="stable")[: m.top_k]
        inner = row if not m.latent_dim else norm(row @ w["latent"]["down"], w["latent"]["norm"]["scale"])
        y = np.zeros(inner.shape)
        for e in chosen:
            hidden = [inner @ w["gate_up"][e, :, g] for g in range(w["gate_up"].shape[2])]
            if m.expert_bias:
                hidden = [h + b for h, b in zip(hidden, np.split(w["gate_up_bias"][e], len(hidden)), strict=True)]
            act = np.maximum(hidden[0], 0) ** 2 if m.activation == "relu2" else silu(hidden[0]) * hidden[1]
            y += score[e] / score[chosen].sum() * (act @ w["down"][e] + (w["down_bias"][e] if m.expert_bias else 0))
        out[place] = y if not m.latent_dim else y @ w["latent"]["up"]
    return out


def numpy_mlp(x, w, activation="swiglu"):
    hidden = np.einsum("...d,dgf->...gf", x.astype(np.float64), w["gate_up"])
    act = (
        np.maximum(hidden[..., 0, :], 0) ** 2 if activation == "relu2" else silu(hidden[..., 0, :]) * hidden[..., -1, :]
    )
    return act @ w["down"]


FORMS = {
    "latent, biased, without gate, gated shared expert": MoEModelConfig(
        num_experts=8,
        top_k=3,
        expert_dim=12,
        scores="sigmoid",
        activation="relu2",
        expert_bias=True,
        latent_dim=16,
        latent_norm=True,
        shared_dim=20,
        shared_gate=True,
        shared_gain=0.5,
    ),
    "shared expert with a gain": MoEModelConfig(num_experts=4, top_k=2, expert_dim=12, shared_dim=20, shared_gain=1.5),
}


@pytest.mark.parametrize("form", FORMS)
def test_moe_equals_numpy(form):
    m = FORMS[form]
    module, w = bound(MoE(run_of(m)))
    x, known = tokens()
    y, _ = jax.jit(lambda x: module(x, known))(x)
    shared = numpy_mlp(x, w["shared"], m.activation) * m.shared_gain
    if m.shared_gate:
        shared = shared / (1 + np.exp(-(x @ w["shared_gate"])))[..., None]
    routed = numpy_moe(x, w, m) * (np.asarray(known.segments) > 0)[..., None]
    np.testing.assert_allclose(y, routed + shared, rtol=1e-4, atol=1e-5)


def test_dense_branch_has_its_own_norm_and_reads_the_residual():
    m = MoEModelConfig(num_experts=4, top_k=2, expert_dim=12, dense_dim=24)
    run = run_of(m)
    module, w = bound(Block(run, LayerSpec()))
    x, known = tokens()
    y, _ = jax.jit(lambda x: module(x, known))(x)
    attended = np.asarray(jax.jit(lambda x: x + module.attention(module.attention_norm(x), known))(x))
    moe = numpy_moe(norm(attended, w["ffn_norm"]["scale"]), w["ffn"], m) * (np.asarray(known.segments) > 0)[..., None]
    want = attended + moe + numpy_mlp(norm(attended, w["dense_norm"]["scale"]), w["dense"])
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scope", ["sequence", "sequence_unbiased"])
def test_balance_loss_of_a_layer_counts_what_its_scope_says(scope):
    """The experts that were chosen with the bias, or as DeepSeek-V3 those of the highest scores."""
    m = MoEModelConfig(num_experts=6, top_k=2, expert_dim=12, scores="sigmoid", selection_bias=True)
    module, w = bound(MoE(dataclasses.replace(run_of(m), loss=LossConfig(balance_scope=scope))))
    x, known = tokens()
    _, statistics = jax.jit(lambda x: module(x, known))(x)
    score = 1 / (1 + np.exp(-x.astype(np.float64) @ w["router"]))
    counted = score + (w["selection_bias"] if scope == "sequence" else 0)
    want, valid = 0.0, np.asarray(known.segments) > 0
    for b in range(B):
        chosen = np.argsort(-counted[b][valid[b]], axis=1)[:, :2]
        fraction = np.bincount(chosen.ravel(), minlength=6) / chosen.size
        want += 6 * (score[b] / score[b].sum(-1, keepdims=True))[valid[b]].sum(0) @ fraction
    np.testing.assert_allclose(statistics.balance_sum, want, rtol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_backward_keeps_no_result_of_experts(biased):
    """The routing weight's gradient is <dY W2^T, A>: of the arrays that wait for it, rows of width D come in alone."""
    rows, width, hidden = 40, 12, 10
    shapes = [(3, width, 2, hidden), (3, hidden, width)] + [(3, 2 * hidden), (3, width)] * biased
    weights = ExpertWeights(*[jnp.ones(shape) for shape in shapes])
    sizes = jnp.asarray([20, 0, 15], jnp.int32)

    def pullback(x, weight, w):
        return jax.vjp(lambda x, weight, w: experts(x, weight, sizes, w, "swiglu", False), x, weight, w)[1]

    kept = jax.tree.leaves(jax.eval_shape(pullback, jnp.ones((rows, width)), jnp.ones(rows), weights))
    wide = [leaf.shape for leaf in kept if leaf.shape[:1] == (rows,) and width in leaf.shape[1:]]
    assert len(wide) == 1, wide


def test_several_shared_experts_are_one_wide_one():
    wide, w = bound(MLP(tiny.config(), 30))
    x, known = tokens()
    parts = [slice(0, 10), slice(10, 17), slice(17, 30)]
    narrow = sum(numpy_mlp(x, {"gate_up": w["gate_up"][:, :, p], "down": w["down"][p]}) for p in parts)
    np.testing.assert_allclose(wide(jnp.asarray(x), known)[0], narrow, rtol=1e-4, atol=1e-5)


def test_biases_of_experts_whose_width_is_sharded_are_refused():
    """They would be added once by every device."""
    m = MoEModelConfig(num_experts=4, top_k=2, expert_dim=12, expert_bias=True)
    run = dataclasses.replace(run_of(m), mesh=MeshConfig(model=2))
    with pytest.raises(UserError, match=r"model.moe.expert_bias=true.*so that biases are added once"):
        MoE(run)


DENSE = Config(model=dataclasses.replace(tiny.MODEL, layers=(LayerGroup(1, (LayerSpec("dense"),)),)))
REFUSED = [
    ("moe.capacity_per", lambda: MoEConfig(capacity_per="expert")),
    ("moe.drop_order", lambda: MoEConfig(drop_order="position")),
    ("moe.renormalize_dropped", lambda: MoEConfig(renormalize_dropped=True)),
    ("moe.deduplicate", lambda: MoEConfig(exchange="gather", deduplicate=True)),
    ("moe.deduplicate", lambda: MoEConfig(deduplicate=True)),
    ("model.moe.shared_gate", lambda: MoEModelConfig(shared_gate=True)),
    ("model.moe.shared_gain", lambda: MoEModelConfig(shared_gain=2.0)),
    ("model.moe.latent_norm", lambda: MoEModelConfig(latent_norm=True)),
    ("model.moe.softmax", lambda: MoEModelConfig(softmax="after", scores="sigmoid")),
    ("model.moe.merge", lambda: MoEModelConfig(softmax="after", merge="raw")),
    ("model.moe.num_groups", lambda: MoEModelConfig(num_groups=3)),
    ("model.moe.top_groups", lambda: MoEModelConfig(top_groups=2)),
    ("model.moe.top_groups", lambda: MoEModelConfig(num_groups=2, top_groups=2)),
    ("model.moe.top_k", lambda: MoEModelConfig(num_groups=4, top_groups=1, top_k=3)),
    ("loss.balance_scope", lambda: LossConfig(balance_weight=0, balance_scope="local")),
    ("loss.balance_scope", lambda: Config(loss=LossConfig(balance_scope="accumulated"))),
    ("loss.balance_scope", lambda: Config(loss=LossConfig(balance_scope="sequence_unbiased"))),
    ("loss.bias_rate", lambda: Config(loss=LossConfig(bias_rate=0.1))),
    ("log.pairs", lambda: dataclasses.replace(DENSE, log=LogConfig(pairs=True))),
    ("moe.exchange", lambda: Config(mesh=MeshConfig(expert=2), moe=MoEConfig("local"))),
    (
        "moe.deduplicate",
        lambda: Config(
            mesh=MeshConfig(expert=8), data=DataConfig(batch_size=8), moe=MoEConfig("padded", deduplicate=True)
        ),
    ),
    (
        "moe.capacity",
        lambda: dataclasses.replace(DENSE, moe=MoEConfig(capacity=1.0)),
    ),
]


@pytest.mark.parametrize(("key", "make"), REFUSED, ids=[f"{i}-{key}" for i, (key, _) in enumerate(REFUSED)])
def test_options_without_effect_are_refused(key, make):
    with pytest.raises(UserError, match=rf"^{key}="):
        make()
