"""Every exchange moves rows as listed; its gradients are the exact transpose: whole numbers, compared bit by bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from moe_oracle import admitted

from moejax.axes import EXPERT
from moejax.moe import rows
from moejax.moe.admission import Capacity
from moejax.moe.exchange import Gather, Local, Padded, Ragged
from moejax.moe.exchange.transport import Updates, send

E, K, T, D, RANKS = 12, 3, 14, 5, 4
CAPACITY = Capacity(0.7, by_weight=True)
AXES = (EXPERT,)
EXCHANGES = {
    "local": Local(E, CAPACITY),
    "padded": Padded(E, RANKS, AXES, CAPACITY, False),
    "padded, de-duplicated": Padded(E, RANKS, AXES, CAPACITY, True),
    "ragged": Ragged(E, RANKS, AXES, CAPACITY, False),
    "ragged, de-duplicated": Ragged(E, RANKS, AXES, CAPACITY, True),
    "gather": Gather(E, RANKS, AXES, CAPACITY),
}


def over_ranks(function, ranks: int):
    """`function` of what each of the ranks has, jitted; results are stacked."""

    def body(*args):
        return jax.tree.map(lambda a: a[None], function(*jax.tree.map(lambda a: a[0], args)))

    mesh, spec = Mesh(np.asarray(jax.devices()[:ranks]), AXES), PartitionSpec(EXPERT)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True))


def routes(ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Choices with padding in between, and weights of which many tie."""
    rng = np.random.default_rng(ranks)
    expert = np.argsort(rng.random((ranks, T, E)) * np.linspace(1, 2, E), axis=2)[:, :, :K].astype(np.int32)
    expert[:, ::5] = E
    return expert, rng.integers(1, 9, expert.shape).astype(np.float32)


def listed(expert: np.ndarray, weight: np.ndarray, name: str) -> tuple[list[list[tuple[int, ...]]], np.ndarray]:
    """Kept routes in the order of the rows of each rank: expert, source, falling weight, position. And which are."""
    ranks = len(expert)
    kept = admitted(expert, weight, E, CAPACITY, name.partition(",")[0])
    found: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    for s, t, k in sorted(np.argwhere(kept).tolist(), key=lambda r: (expert[*r], r[0], -weight[*r], r[1], r[2])):
        found[expert[s, t, k] // (E // ranks)].append((s, t, k))
    return found, kept


@pytest.mark.parametrize("name", EXCHANGES)
def test_gradients_are_the_exact_transpose(monkeypatch, name):
    """Rows in bfloat16, weights in float32, drops, and NaN in every row that nobody wrote."""
    monkeypatch.setattr(rows, "UNWRITTEN", np.nan)
    exchange, ranks = EXCHANGES[name], 1 if name == "local" else RANKS
    expert, weight = routes(ranks)
    order, kept = listed(expert, weight, name)
    assert 0 < kept.sum() < (expert < E).sum()
    most = max(map(len, order))
    rng = np.random.default_rng(0)
    whole = lambda *shape: rng.integers(-8, 9, (ranks, *shape)).astype(np.float32)  # noqa: E731
    x, w, dy, dw, out, dout = whole(T, D), whole(T, K), whole(most, D), whole(most), whole(most, D), whole(T, D)

    def run(expert, weight, x, w, dy, dw, out, dout):
        plan, low = exchange.plan(expert, weight), jnp.bfloat16
        x, dy, out, dout = (a.astype(low) for a in (x, dy, out, dout))

        def dispatch(x, w):
            rows_RD, weight_R, _ = exchange.dispatch(x, w, plan)
            return rows_RD, weight_R

        def spread(a, size):
            """As many rows as the buffer has; garbage where there are none."""
            a = jnp.pad(a, ((0, size), *((0, 0) for _ in a.shape[1:])), constant_values=np.nan)[:size]
            live = (jnp.arange(size) < jnp.sum(plan.sizes_e)).reshape(-1, *[1] * (a.ndim - 1))
            return jnp.where(live, a, jnp.asarray(np.nan, a.dtype))

        (rows_RD, weight_R), back = jax.vjp(dispatch, x, w)
        size = len(rows_RD)
        dx, dweight = back((spread(dy, size), spread(dw, size)))
        plan_on_arrival = exchange.dispatch(x, w, plan)[2]
        y, back = jax.vjp(lambda a: exchange.combine(a, plan_on_arrival), spread(out, size))
        return {"rows": rows_RD, "weight": weight_R, "dx": dx, "dw": dweight, "y": y, "dout": back(dout)[0]}

    got = jax.device_get(over_ranks(run, ranks)(expert, weight, x, w, dy, dw, out, dout))
    got = {key: np.asarray(value, np.float32) for key, value in got.items()}
    want: dict[str, Any] = {"dx": np.zeros_like(x), "dw": np.zeros_like(w), "y": np.zeros_like(dout)}
    for q, routes_q in enumerate(order):
        for r, (s, t, k) in enumerate(routes_q):
            np.testing.assert_array_equal(got["rows"][q, r], x[s, t])
            np.testing.assert_array_equal(got["weight"][q, r], w[s, t, k])
            np.testing.assert_array_equal(got["dout"][q, r], dout[s, t])
            want["dx"][s, t] += dy[q, r]
            want["dw"][s, t, k] = dw[q, r]
            want["y"][s, t] += out[q, r]
    for key, value in want.items():
        np.testing.assert_array_equal(got[key], value, err_msg=key)


def test_emulation_does_what_senders_say():
    """ragged_all_to_all as it is defined, sender by sender: the receiver only has to agree on sizes."""
    ranks, parts, width = 4, 3, 2
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 4, (ranks, ranks, parts)).astype(np.int32)
    sizes[1] = 0  # sends nothing
    sizes[:, 2] = 0  # receives nothing
    slots, room = int(sizes.sum((1, 2)).max()) + 2, int(sizes.sum((0, 2)).max()) + 3
    x = rng.standard_normal((ranks, slots, width)).astype(np.float32)
    everyone = np.broadcast_to(sizes, (ranks, *sizes.shape))

    def run(sizes, x):
        updates = Updates.make(sizes, jax.lax.axis_index(AXES))
        (there,) = send((x,), room, updates, AXES, (-7.0,))
        (back,) = send((there,), slots, updates.reverse(), AXES, (-9.0,))
        return updates._asdict(), updates.reverse()._asdict(), there, back

    updates, reverse, there, back = jax.device_get(over_ranks(run, ranks)(everyone, x))

    def sent(source: np.ndarray, size: int, fill: float, updates: dict) -> np.ndarray:
        result = np.full((ranks, size, width), fill, np.float32)
        for me in range(ranks):
            for i in range(ranks * parts):
                peer, count = i // parts, updates["send"][me][i]
                assert count == updates["receive"][peer][me * parts + i % parts]
                a, b = updates["input"][me][i], updates["output"][me][i]
                result[peer, b : b + count] = source[me, a : a + count]
        return result

    np.testing.assert_array_equal(there, sent(x, room, -7.0, updates))
    np.testing.assert_array_equal(back, sent(there, slots, -9.0, reverse))
    used = sizes.sum((1, 2))
    for me in range(ranks):
        np.testing.assert_array_equal(back[me, : used[me]], x[me, : used[me]])
        assert (back[me, used[me] :] == -9).all()
