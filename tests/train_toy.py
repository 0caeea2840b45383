"""A program and a loader small enough to compile in a second, with the interfaces of the real ones.

As a script it trains: `python train_toy.py ROOT [key=value ...]`. TOY_KILL=S kills it before step S, once the save in
progress is complete; TOY_KILL=seal:N inside save number N, just before the checkpoint gets its name; TOY_KILL=after:T
after T seconds.
"""

import copy
import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from moejax.axes import AXES
from moejax.config import Config
from moejax.errors import UserError
from moejax.train.optimizer import make_optimizer, opt_shardings
from moejax.train.state import TrainState
from moejax.train.step import update

DIMS = {
    "embed": {"table": ("vocab", "embed")},
    "groups_0": {"experts": ("layers", "experts", "expert_embed", "expert_mlp"), "norm": ("layers", "norm")},
    "head": {"kernel": ("embed", "vocab")},
}
LAYERS, HIDDEN, SYMBOLS = 2, 8, 16
SPECS = {
    "embed": {"table": PartitionSpec(None, ("data", "expert"))},
    "groups_0": {"experts": PartitionSpec(None, "expert", "data"), "norm": PartitionSpec()},
    "head": {"kernel": PartitionSpec("data")},
}


class ToyStep:
    """The training step with its poison; it is compiled when it is called first."""

    def __init__(self, compiled, poison):
        self._compiled, self._poison = compiled, poison

    def __call__(self, state, batch):
        return self._compiled(state, batch, self._poison)

    def as_text(self):
        return "HloModule toy"


class ToyProgram:
    """A small model over tokens. `poison` holds steps (from 1) whose loss is not finite."""

    def __init__(self, config):
        self.config = config
        devices = np.array(jax.devices()[: config.mesh.size]).reshape(config.mesh.shape)
        self.mesh = jax.sharding.Mesh(devices, AXES)
        self.poison = jnp.full(8, -1, jnp.int32)
        self.optimizer, self.schedule = make_optimizer(config, DIMS)
        model = config.model
        self.shapes = {
            "embed": {"table": (model.vocab_size, model.d_model)},
            "groups_0": {
                "experts": (LAYERS, model.moe.num_experts, model.d_model, HIDDEN),
                "norm": (LAYERS, model.d_model),
            },
            "head": {"kernel": (model.d_model, model.vocab_size)},
        }
        shardings = jax.tree.map(lambda s: NamedSharding(self.mesh, s), SPECS)
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        params = jax.eval_shape(self._init, 0).params
        opt = opt_shardings(self.optimizer, params, shardings, self.replicated)
        self.shardings = TrainState(self.replicated, shardings, opt, self.replicated, self.replicated)
        self.abstract_state = jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            jax.eval_shape(self._init, 0),
            self.shardings,
        )
        self.batch_sharding = NamedSharding(self.mesh, PartitionSpec(("data", "expert")))
        shape = (config.data.batch_size, config.data.sequence_length)
        index = self.batch_sharding.addressable_devices_indices_map(shape).values()
        self.rows = sorted({row for i in index if i for row in range(*i[0].indices(shape[0]))})
        self._compiled = jax.jit(self._step, donate_argnums=0, out_shardings=(self.shardings, self.replicated))
        self.eval_step = jax.jit(lambda params, batch: self._sums(params, batch), out_shardings=self.replicated)
        self.init = jax.jit(self._init, out_shardings=self.shardings)

    def _init(self, seed):
        key = jax.random.key(seed)
        is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
        params = jax.tree.map(lambda s: 0.1 * jax.random.normal(key, s), self.shapes, is_leaf=is_shape)
        zero = jnp.int32(0)
        return TrainState(zero, params, self.optimizer.init(params), zero, zero)

    @property
    def compiled_step(self):
        return ToyStep(self._compiled, self.poison)

    def poisoned(self, poison):
        """The same compiled program with other poison."""
        other = copy.copy(self)
        other.poison = jnp.array([*poison] + [-1] * (8 - len(poison)), jnp.int32)
        return other

    def put(self, batch):
        shape = (self.config.data.batch_size, self.config.data.sequence_length)
        return {k: jax.make_array_from_process_local_data(self.batch_sharding, v, shape) for k, v in batch.items()}

    def _sums(self, params, batch):
        x = params["embed"]["table"][batch["tokens"]]
        for layer in range(LAYERS):
            hidden = jnp.einsum(
                "bsd,edf->bsf", x * params["groups_0"]["norm"][layer], params["groups_0"]["experts"][layer]
            )
            x = x + jnp.pad(jnp.tanh(hidden), ((0, 0), (0, 0), (0, x.shape[-1] - HIDDEN)))
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"]["kernel"], batch["targets"])
        valid = batch["segments"] > 0
        return {"loss_sum": jnp.sum(jnp.where(valid, losses, 0.0)), "tokens": jnp.sum(valid, dtype=jnp.int32)}

    def _step(self, state, batch, poison):
        def loss_fn(params):
            sums = self._sums(params, batch)
            return sums["loss_sum"] / sums["tokens"].astype(jnp.float32), sums["tokens"]

        (loss, tokens), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        loss = jnp.where(jnp.any(poison == state.step + 1), jnp.nan, loss)
        zero = jnp.float32(0)
        metrics = {"loss": loss, "ce_loss": loss, "balance_loss": zero, "z_loss": zero, "tokens": tokens}
        metrics |= {"grad_norm": optax.tree.norm(grads), "learning_rate": self.schedule(state.step - state.skipped)}
        return update(state, grads, metrics, self.optimizer, self.config.optimizer.clip_norm)


class ToyLoader:
    """Tokens drawn by seed, split and step. Token t stands for t % 3 bytes; the last row ends in padding."""

    def __init__(self, config, split, quiet=False):
        self.config, self.split = config, split
        self.vocab_size = config.model.vocab_size
        self.token_bytes = np.arange(self.vocab_size, dtype=np.int32) % 3
        self.fingerprint = f"toy {config.data.corpus} {split}"
        self.num_rows = 1000

    def batch(self, step, rows=None):
        data = self.config.data
        rng = np.random.default_rng([self.config.run.seed if self.split == "train" else 99, step])
        tokens = rng.integers(0, SYMBOLS, (data.batch_size, data.sequence_length + 1)).astype(np.int32)
        follow = rng.random(tokens[:, 1:].shape) < 0.7
        tokens[:, 1:] = np.where(follow, (tokens[:, :-1] * 5 + 1) % SYMBOLS, tokens[:, 1:])
        segments = np.ones((data.batch_size, data.sequence_length), np.int32)
        segments[-1, 3:] = 0
        positions = np.broadcast_to(np.arange(data.sequence_length, dtype=np.int32), segments.shape)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments, "positions": positions}
        batch = {k: np.where(segments > 0, v, 0).astype(np.int32) for k, v in batch.items()}
        return batch if rows is None else {k: v[list(rows)] for k, v in batch.items()}

    def batches(self, start_step, rows=None):
        step = start_step
        while True:
            yield self.batch(step, rows)
            step += 1


def toy_config(root, *overrides):
    """A configuration of the toy model with its run in `root`."""
    from moejax.configure import load_config

    base = [
        f"run.root={root}", "run.name=toy", "mesh.data=2", "mesh.expert=4", "model.vocab_size=264", "model.d_model=16",
        "model.moe.num_experts=4", "data.sequence_length=8", "data.batch_size=8", "train.steps=12", "log.every=1",
        "eval.every=6", "eval.batches=2", "checkpoint.every=4", "optimizer.warmup_steps=2",
        "optimizer.learning_rate=0.05",
    ]  # fmt: skip
    return load_config(None, [*base, *overrides])


@functools.cache
def _compiled(mesh, model, data, train, optimizer):
    config = Config(mesh=mesh, model=model, data=data, train=train, optimizer=optimizer)
    return ToyProgram(config)


def toy_program(config, poison=()):
    """The toy program of a configuration; tests that need the same one compile it once."""
    return _compiled(config.mesh, config.model, config.data, config.train, config.optimizer).poisoned(poison)


def toy_trainer(config, poison=(), program=toy_program, **options):
    """A Trainer of the toy model."""
    from moejax.train.trainer import Trainer

    return Trainer(config, make_program=lambda c, mesh: program(c, poison), make_loader=ToyLoader, **options)


def _saving(root: Path) -> bool:
    """Whether a checkpoint is being written."""
    try:
        return any(root.rglob("*.orbax-checkpoint-tmp*"))
    except FileNotFoundError:  # a folder got its final name while we looked
        return True


def _die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _arm(spec):
    """Be killed as TOY_KILL says."""
    from moejax.train.checkpoint import Checkpoints

    if spec.startswith("seal:"):
        seal, left = Checkpoints._seal, [int(spec.split(":")[1])]

        def sealed(self):
            left[0] -= 1
            if left[0] == 0:
                _die()
            seal(self)

        Checkpoints._seal = sealed
    elif spec.startswith("after:"):
        threading.Timer(float(spec.split(":")[1]), _die).start()
    elif spec:
        batch = ToyLoader.batch

        def counted(self, step, rows=None):
            if self.split == "train" and step + 1 == int(spec):
                while _saving(Path(self.config.run.root)):
                    time.sleep(0.01)
                _die()
            return batch(self, step, rows)

        ToyLoader.batch = counted


def main():
    from moejax.train.guards import Preempted, TrainingStopped

    root, *overrides = sys.argv[1:]
    _arm(os.environ.get("TOY_KILL", ""))
    try:
        toy_trainer(toy_config(root, *overrides)).run()
    except (Preempted, TrainingStopped) as ending:
        print(ending, file=sys.stderr)
        return ending.exit_code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
