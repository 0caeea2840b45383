"""Loss and bits per byte on held-out text."""

import contextlib
import math
from typing import Any

import jax
import numpy as np

from moejax.config import Config
from moejax.data.loader import Loader
from moejax.errors import UserError
from moejax.train import distributed
from moejax.train.checkpoint import Checkpoints
from moejax.train.folder import RunFolder
from moejax.train.program import Program


class HeldOut:
    """The batches of one evaluation, the same every time.

    Args:
        config: Uses `eval.batches`.
        loader: Loader of the held-out split.
    """

    def __init__(self, config: Config, loader: Any) -> None:
        self._loader = loader
        self._batches = config.eval.batches
        self._bytes: int | None = None

    def _num_bytes(self) -> int:
        """Return how many bytes of text all targets stand for, in the global batches."""
        if self._bytes is None:
            batches = [self._loader.batch(i) for i in range(self._batches)]
            counts = [self._loader.token_bytes[b["targets"]][np.asarray(b["segments"]) != 0] for b in batches]
            self._bytes = sum(int(count.sum(dtype=np.int64)) for count in counts)
        return self._bytes

    def evaluate(self, program: Any, params: Any) -> dict[str, float]:
        """Return `eval/loss` (nats per token, over all valid tokens) and `eval/bits_per_byte`.

        Bits per byte is the summed loss in bits over the bytes of text that the targets stand for, so that it
        compares across tokenizers.
        """
        sums = []
        for i in range(self._batches):
            batch = self._loader.batch(i, rows=program.rows)
            sums.append(program.eval_step(params, program.put(batch)))
        sums = jax.device_get(sums)
        loss_sum = math.fsum(float(s["loss_sum"]) for s in sums)
        tokens = sum(int(s["tokens"]) for s in sums)
        return {
            "eval/loss": loss_sum / max(tokens, 1),
            "eval/bits_per_byte": loss_sum / math.log(2) / max(self._num_bytes(), 1),
        }


def evaluate_run(config: Config) -> dict[str, Any]:
    """Evaluate the newest checkpoint of the run that `config` names, on the mesh that it names.

    Returns:
        `step`, `eval/loss` and `eval/bits_per_byte`.

    Raises:
        UserError: There is no checkpoint, or it is one of another model.
    """
    folder = RunFolder(config)
    program = Program(config, distributed.start(config))
    with contextlib.closing(Checkpoints(folder.checkpoints, read_only=True)) as checkpoints:
        step = checkpoints.newest()
        if step is None:
            raise UserError(f"{folder.path}: holds no complete checkpoint: train first, with moejax train CONFIG")
        params = checkpoints.restore_params(step, program.abstract_state.params)
    loader = Loader(config, "heldout", quiet=jax.process_index() != 0)
    return {"step": step, **HeldOut(config, loader).evaluate(program, params)}
