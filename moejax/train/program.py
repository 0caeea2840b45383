"""Everything that is compiled for a run: abstract state, initialisation, training step, evaluation."""

import dataclasses
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.config import Config
from moejax.model.decoder import Decoder, Params
from moejax.model.parameters import initialize
from moejax.sharding import make_layouts, make_mesh, storage_shardings
from moejax.train.optimizer import make_optimizer, opt_shardings
from moejax.train.state import TrainState
from moejax.train.step import BATCH_SPEC, evaluation_function, gradient_function, update

BATCH_KEYS = ("tokens", "targets", "segments", "positions")


class Program:
    """The compiled functions of a configuration on a mesh.

    Args:
        config: The run.
        mesh: Mesh to use; by default one over all devices.

    Attributes:
        layouts: Tree of `Layout`, like the parameters.
        abstract_state: `TrainState` of shapes with shardings.
        batch_sharding: Sharding of the [B, S] arrays of a batch.
        rows: Rows of the global batch that this process feeds.
    """

    def __init__(self, config: Config, mesh: Mesh | None = None):
        self.config = config
        self.mesh = make_mesh(config.mesh) if mesh is None else mesh
        self.decoder = Decoder(config)
        shapes = jax.tree.map(lambda s: s.shape, self.decoder.shapes)
        self.layouts = make_layouts(self.decoder.dims, shapes, config)
        self.optimizer, self.schedule = make_optimizer(config, self.decoder.dims)
        self.gradients = gradient_function(self.decoder, self.layouts, config, self.mesh)
        still = dataclasses.replace(config.without_mtp, moe=dataclasses.replace(config.moe, jitter=0.0))
        evaluate = evaluation_function(Decoder(still), self.layouts, still, self.mesh)
        self.state_shardings = self._state_shardings()
        self.abstract_state = jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            jax.eval_shape(self._init, 0),
            self.state_shardings,
        )
        self.batch_shape = (config.data.batch_size, config.data.sequence_length)
        self.batch_sharding = NamedSharding(self.mesh, BATCH_SPEC)
        self.rows = self._rows()
        replicated = NamedSharding(self.mesh, PartitionSpec())
        self._jitted_init = jax.jit(self._init, out_shardings=self.state_shardings)
        self.train_step = jax.jit(self._step, donate_argnums=0, out_shardings=(self.state_shardings, replicated))
        self.eval_step = jax.jit(evaluate)

    @property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a global batch."""
        return {
            key: jax.ShapeDtypeStruct(self.batch_shape, jnp.int32, sharding=self.batch_sharding) for key in BATCH_KEYS
        }

    @cached_property
    def compiled_step(self) -> jax.stages.Compiled:
        """`train_step`, compiled ahead: its text and memory can be read, and nothing is compiled twice."""
        return self.train_step.lower(self.abstract_state, self.abstract_batch).compile()

    def init(self, seed: int) -> TrainState:
        """State of step 0, made on the devices in its sharding."""
        return self._jitted_init(np.uint32(seed))

    def put(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Global batch on the devices from this process's `rows` of it, in their order."""
        place = {row: i for i, row in enumerate(self.rows)}

        def shard(array: np.ndarray, index: Any) -> np.ndarray:
            rows = range(*index[0].indices(self.batch_shape[0]))
            return array[[place[row] for row in rows]][:, index[1]]

        return {
            key: jax.make_array_from_callback(self.batch_shape, self.batch_sharding, partial(shard, batch[key]))
            for key in BATCH_KEYS
        }

    def _rows(self) -> list[int]:
        indices: Any = self.batch_sharding.addressable_devices_indices_map(self.batch_shape)
        return sorted({row for index in indices.values() for row in range(*index[0].indices(self.batch_shape[0]))})

    def _init(self, seed: Any) -> TrainState:
        params = initialize(jnp.asarray(seed, jnp.uint32), self.decoder.shapes, self.decoder.stds)
        zero = jnp.int32(0)
        return TrainState(zero, params, self.optimizer.init(params), zero, zero)

    def _state_shardings(self) -> TrainState:
        params = storage_shardings(self.layouts, self.mesh)
        replicated = NamedSharding(self.mesh, PartitionSpec())
        opt_state = opt_shardings(self.optimizer, self.decoder.shapes, params, replicated)
        return TrainState(replicated, params, opt_state, replicated, replicated)

    def _step(self, state: TrainState, batch: Params) -> tuple[TrainState, Params]:
        grads, metrics = self.gradients(state.params, batch)
        metrics |= {"learning_rate": self.schedule(state.step - state.skipped)}
        with jax.named_scope("update"):
            state, metrics = update(state, grads, metrics, self.optimizer, self.config.optimizer.clip_norm)
            if self.config.loss.bias_rate:
                rate = jnp.where(state.bad_streak == 0, self.config.loss.bias_rate, 0.0)
                params = self.decoder.move_selection_biases(state.params, metrics["moe/requested"], rate)
                state = state._replace(params=params)
        return state, metrics
