"""Independent oracle of the decoder and its loss: one device, float32, full scores, a loop over experts.

It shares no code with moejax.nn, moejax.moe or moejax.model, only the layout of the parameters.
"""

import jax
import jax.numpy as jnp

from moejax.config import Config

HIGHEST = jax.lax.Precision.HIGHEST


def exact(x, w):
    """Every product of activations with a matrix [K, N], apart from router and head."""
    return jnp.matmul(x, w, precision=HIGHEST)


def _norm(x, scale, eps):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def _rope(x, positions, theta):
    """Complex rotation of (x[i], x[i + half]) for one sequence [S, H, d]."""
    half = x.shape[-1] // 2
    frequency = jnp.exp(-jnp.log(theta) * jnp.arange(half) / half)
    angle = positions[:, None, None] * frequency
    z = jax.lax.complex(x[..., :half], x[..., half:]) * jax.lax.complex(jnp.cos(angle), jnp.sin(angle))
    return jnp.concatenate([z.real, z.imag], -1)


def _attention(x, w, segments, positions, window, config, product):
    a = config.model.attention
    q, k, v = (
        product(x, w[name].reshape(x.shape[1], -1)).reshape(len(x), -1, a.head_dim)
        for name in ("query", "key", "value")
    )
    if a.qk_norm == "head":
        q, k = (_norm(t, w[n]["scale"], config.model.norm_eps) for t, n in ((q, "query_norm"), (k, "key_norm")))
    if a.qk_norm == "full":
        flat = [t.reshape(len(x), -1) for t in (q, k)]
        flat = [
            _norm(t, w[n]["scale"], config.model.norm_eps)
            for t, n in zip(flat, ("query_norm", "key_norm"), strict=True)
        ]
        q, k = flat[0].reshape(q.shape), flat[1].reshape(k.shape)
    q, k = _rope(q, positions, a.rope_theta), _rope(k, positions, a.rope_theta)
    group = a.num_heads // a.num_kv_heads
    row, column = jnp.mgrid[: len(x), : len(x)]
    mask = (column <= row) & (segments[:, None] == segments[None])
    if window is not None:
        mask &= row - column < window
    heads = []
    for h in range(a.num_heads):
        scores = jnp.matmul(q[:, h], k[:, h // group].T, precision=HIGHEST) / jnp.sqrt(jnp.float32(a.head_dim))
        probs = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
        heads.append(jnp.matmul(probs, v[:, h // group], precision=HIGHEST))
    return product(jnp.concatenate(heads, 1), w["out"].reshape(-1, x.shape[1]))


def _mlp(x, gate_up, down, product, weight=None):
    gate, up = (product(x, gate_up[:, i]) for i in range(2))
    hidden = jax.nn.sigmoid(gate) * gate * up
    return product(hidden if weight is None else hidden * weight, down)


def _moe(x, w, valid, config, product):
    """Every expert on every token, weighted by a dense [S, E] matrix of weights."""
    m = config.model.moe
    scores = jax.nn.softmax(jnp.matmul(x, w["router"], precision=HIGHEST), -1)
    rank = jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1, stable=True)
    chosen = (rank < m.top_k) & valid[:, None]
    weights = jnp.where(chosen, scores, 0.0)
    if m.merge == "sum_to_one":
        weights = weights / jnp.where(valid, weights.sum(-1), 1.0)[:, None]
    y = sum(_mlp(x, w["gate_up"][e], w["down"][e], product, weights[:, e : e + 1]) for e in range(m.num_experts))
    if m.shared_dim:
        y = y + _mlp(x, w["shared"]["gate_up"], w["shared"]["down"], product)
    num_valid = jnp.maximum(valid.sum(), 1)
    fraction = jax.lax.stop_gradient(chosen.sum(0).astype(jnp.float32) / (m.top_k * num_valid))
    mean_score = jnp.where(valid[:, None], scores, 0.0).sum(0) / num_valid
    balance = m.num_experts * (fraction * mean_score).sum()
    lse = jnp.log(jnp.exp(jnp.matmul(x, w["router"], precision=HIGHEST)).sum(-1))
    return y, balance * valid.sum(), jnp.where(valid, lse**2, 0.0).sum(), chosen.sum(0)


def _layer(x, w, spec, row, valid, config: Config, product):
    """One layer, with balance loss, z-loss and counts of its router; zeros and None without one."""
    eps = config.model.norm_eps
    y = _norm(x, w["attention_norm"]["scale"], eps)
    x = x + _attention(y, w["attention"], row["segments"], row["positions"], spec.window, config, product)
    y = _norm(x, w["ffn_norm"]["scale"], eps)
    if spec.ffn == "dense":
        return x + _mlp(y, w["ffn"]["gate_up"], w["ffn"]["down"], product), 0.0, 0.0, None
    y, balance, z, counts = _moe(y, w["ffn"], valid, config, product)
    return x + y, balance, z, counts


def _cross_entropy(params, x, targets, valid):
    head = params["head"] if "head" in params else params["embed"].T
    logp = jax.nn.log_softmax(jnp.matmul(x, head, precision=HIGHEST), -1)
    return -jnp.where(valid, logp[jnp.arange(len(valid)), targets], 0.0).sum()


def _modules(params, x, row, config: Config, product):
    """Multi-token prediction, one position after the other: cross-entropy, balance loss, z-loss and counts of each."""
    eps, length = config.model.norm_eps, len(row["tokens"])
    found = []
    for k in range(1, config.model.mtp + 1):
        w = jax.tree.map(lambda a, k=k: a[k - 1], params["mtp"])
        own = _norm(x, w["join"]["hidden_norm"]["scale"], eps)
        embedded = _norm(params["embed"][row["tokens"]], w["join"]["embed_norm"]["scale"], eps)
        joined, targets, valid = [], [], []
        for i in range(length):
            inside = i + k < length
            ahead = i + k if inside else 0
            together = [row["segments"][i] == row["segments"][j] for j in range(i, min(i + k + 1, length))]
            valid.append(jnp.stack([row["segments"][i] > 0, jnp.bool_(inside), *together]).all())
            joined.append(jnp.concatenate([own[i], embedded[ahead]]))
            targets.append(row["targets"][ahead])
        valid, spec = jnp.stack(valid), config.model.layers[-1].pattern[-1]
        x = product(jnp.stack(joined), w["join"]["projection"])
        x, *router = _layer(x, w["0"], spec, row, valid, config, product)
        y = _norm(x, w["join"]["final_norm"]["scale"], eps)
        found.append((_cross_entropy(params, y, jnp.stack(targets), valid), *router))
    return found


def _sequence(params, row, config: Config, product):
    valid = row["segments"] > 0
    x = params["embed"][row["tokens"]]
    routers, mtp = [], jnp.float32(0)
    for g, group in enumerate(config.model.layers):
        for repetition in range(group.repeat):
            for i, spec in enumerate(group.pattern):
                w = jax.tree.map(lambda a, r=repetition: a[r], params[f"groups_{g}"][str(i)])
                x, *router = _layer(x, w, spec, row, valid, config, product)
                routers.append(router)
    for ce, *router in _modules(params, x, row, config, product):
        mtp += ce
        routers.append(router)
    ce = _cross_entropy(params, _norm(x, params["final_norm"]["scale"], config.model.norm_eps), row["targets"], valid)
    balance, z = (jnp.stack([jnp.asarray(router[i], jnp.float32) for router in routers]).sum() for i in range(2))
    counts = [router[2] for router in routers if router[2] is not None] or [jnp.zeros(1, jnp.int32)]
    return ce, balance, z, mtp, valid.sum(), jnp.stack(counts)


def reference_loss(params, batch, config: Config, product=exact):
    """Loss of a whole batch and its parts: ce, balance, z, mtp, and requested counts [L, E]."""
    ce, balance, z, mtp, tokens, counts = jax.vmap(lambda row: _sequence(params, row, config, product))(batch)
    n = tokens.sum().astype(jnp.float32)
    layers = len(counts[0])
    parts = {"ce_loss": ce.sum() / n, "balance_loss": balance.sum() / n / layers, "z_loss": z.sum() / n / layers}
    parts["mtp_loss"] = mtp.sum() / n / max(config.model.mtp, 1)
    weights = {"ce_loss": 1.0, "balance_loss": config.loss.balance_weight, "z_loss": config.loss.z_weight}
    loss = sum(weight * parts[key] for key, weight in (weights | {"mtp_loss": config.loss.mtp_weight}).items())
    return loss, parts | {"counts": counts.sum(0)}
