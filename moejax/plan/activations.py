"""What forward keeps for backward on one device: read off the traced step, without compiling it.

`jax.vjp` says which arrays backward will read. Tracing it inside `shard_map` over an abstract mesh gives their
shapes on one device, and needs no devices. What does not grow with the number of sequences is left out: weights in
another shape, which are no copies, and gradients that are counted elsewhere. A slot of a pipeline's stash is another
matter: it holds every leaf that the schedule does not find elsewhere.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from moejax.axes import AXES, TOKEN_AXES
from moejax.config import Config, LayerGroup, LossConfig, MoEConfig, RematConfig, WeightsConfig
from moejax.model.decoder import Decoder
from moejax.model.tokens import Tokens
from moejax.nn.cross_entropy import CHUNK
from moejax.schedule.residuals import Residuals
from moejax.sharding import compute_axes, is_layout, make_layouts
from moejax.train.program import BATCH_KEYS
from moejax.varying import vary

_WHOLE: dict[str, Any] = {"remat": RematConfig("none"), "weights": WeightsConfig("step")}
_DENSE: dict[str, Any] = {"moe": MoEConfig(), "loss": LossConfig()}


def saved_bytes(config: Config) -> int:
    """Bytes that forward keeps of each sequence of a device for its backward pass."""
    return _sequence_bytes(dataclasses.replace(config, weights=WeightsConfig("step")))


def layer_bytes(config: Config) -> tuple[int, ...]:
    """Bytes of all that one repetition of each pattern makes of a sequence for its backward pass."""
    found, config = [], config.without_mtp
    vocab = 257 + -257 % config.mesh.group(compute_axes(config, "vocab"))  # small, and divisible among its shards
    for spec in config.model.layers:
        one = dataclasses.replace(config.model, layers=(LayerGroup(1, spec.pattern),), vocab_size=vocab)
        run = dataclasses.replace(config, model=one, **_WHOLE, **({} if one.num_moe_layers else _DENSE))
        found.append(_sequence_bytes(run) - _ends_bytes(run))
    return tuple(found)


def stash_bytes(config: Config) -> tuple[int, ...]:
    """Bytes that a pipeline keeps of a microbatch for one repetition of each pattern: what `Residuals` takes apart.

    Args:
        config: A run without stages, whose only microbatch is one of the pipeline's.
    """
    decoder, found = Decoder(config), []

    def body(weights: Any, batch: Any) -> jax.Array:
        x_BSD = vary(decoder.embed(vary(weights, TOKEN_AXES), batch), TOKEN_AXES)
        live = vary(batch["segments"][0, 0] > 0, TOKEN_AXES)
        for name, group in decoder.groups.items():
            run = group.recomputed(group.repetition, always=True)
            w = vary(jax.tree.map(lambda a: a[0], weights[name]), TOKEN_AXES)

            def one(w: Any, x: Any, run: Any = run) -> Any:
                return run(w, x, Tokens(batch["segments"], batch["positions"], live))

            _, pull = jax.vjp(one, w, x_BSD)
            found.append(sum(_sizes(Residuals().split(pull, (w, batch, live)))))
        return jnp.float32(0)

    _trace(body, config, decoder)
    return tuple(found)


def logit_bytes(config: Config) -> int:
    """Bytes of the loss at its peak: float32 logits of a chunk with their gradient, and the head's gradient.

    Multi-token prediction has a second gradient of the head, while the first one waits.
    """
    tokens = local_batch(config)[0] * local_batch(config)[1]
    vocab = config.model.vocab_size // config.mesh.group(compute_axes(config, "vocab"))
    width = 4 if config.model.dtype == "float32" else 2
    head = config.model.d_model * vocab * (4 + width * (2 if config.model.mtp else 1))
    return min(CHUNK, tokens) * vocab * (2 * 4 + width) + head


def local_batch(config: Config) -> tuple[int, int]:
    """Sequences and positions of one microbatch on one device."""
    rows = config.data.batch_size // (config.mesh.data * config.mesh.expert * config.train.microbatches)
    return rows, config.data.sequence_length // config.mesh.context


def _ends_bytes(config: Config) -> int:
    """What the embedding, the last norm and the head keep of a sequence: hidden states and their gradient."""
    width, (_, length) = (4 if config.model.dtype == "float32" else 2), local_batch(config)
    return length * config.model.d_model * (width + 4)


def _sequence_bytes(config: Config) -> int:
    """What grows with each sequence that a device has in a microbatch."""
    shards = config.mesh.data * config.mesh.expert * config.train.microbatches
    one, two = (
        dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=rows * shards)) for rows in (1, 2)
    )
    return _residual_bytes(two) - _residual_bytes(one)


def _residual_bytes(config: Config) -> int:
    decoder = Decoder(config)
    found: list[int] = []

    def body(weights: Any, batch: Any) -> jax.Array:
        weights = vary(weights, TOKEN_AXES)
        sums, pullback = jax.vjp(lambda w: decoder.sums(w, batch, lambda name, stored: stored), weights)
        known = [id(leaf) for leaf in jax.tree.leaves((weights, batch))]
        found.append(sum(_sizes(leaf for leaf in jax.tree.leaves(pullback) if id(leaf) not in known)))
        return jax.lax.psum(sums.ce, TOKEN_AXES)

    _trace(body, config, decoder)
    return found[0]


def _global_batch(config: Config) -> tuple[int, int]:
    return config.data.batch_size // config.train.microbatches, config.data.sequence_length


def _sizes(leaves: Iterable[Any]) -> Iterable[int]:
    seen = set()
    for leaf in leaves:
        if hasattr(leaf, "dtype") and id(leaf) not in seen:
            seen.add(id(leaf))
            yield math.prod(leaf.shape) * (1 if leaf.dtype == bool else leaf.dtype.itemsize)


def _trace(body: Callable[[Any, Any], jax.Array], config: Config, decoder: Decoder) -> None:
    """Trace a function of compute weights and one microbatch as it runs on one device."""
    shapes = jax.tree.map(lambda s: s.shape, decoder.shapes)
    plain = dataclasses.replace(config.sharding, compute={}, storage={})
    layouts = make_layouts(decoder.dims, shapes, dataclasses.replace(config, sharding=plain))
    weights = jax.tree.map(
        lambda layout: jax.ShapeDtypeStruct(layout.shape, layout.dtype(decoder.dtype)), layouts, is_leaf=is_layout
    )
    specs = jax.tree.map(lambda layout: layout.compute_spec, layouts, is_leaf=is_layout)
    batch = {key: jax.ShapeDtypeStruct(_global_batch(config), jnp.int32) for key in BATCH_KEYS}
    mesh = AbstractMesh(config.mesh.shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    specs = (specs, PartitionSpec(("data", "expert"), "context"))
    jax.eval_shape(
        jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=True), weights, batch
    )
