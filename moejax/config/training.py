"""Text, length of a run, optimizer, and what is written."""

from dataclasses import dataclass
from typing import Literal

from moejax.config.checks import not_negative, positive, require


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and its seed.

    Args:
        root: Folder that holds runs.
        name: Folder of this run inside `root`.
        seed: Seed of parameters, data order and sampling.
    """

    root: str = "runs"
    name: str = "default"
    seed: int = 0

    def __post_init__(self) -> None:
        require(
            bool(self.name) and "/" not in self.name and self.name not in (".", ".."),
            "run.name",
            repr(self.name),
            "a folder name without '/'",
        )
        require(0 <= self.seed < 2**32, "run.seed", self.seed, "between 0 and 2**32 - 1")


@dataclass(frozen=True)
class MixtureSource:
    """One corpus of a mixture.

    Args:
        corpus: As `data.corpus`.
        weight: Share of sequences, relative to the other sources.
    """

    corpus: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        require(self.weight > 0, "data.mixture.weight", self.weight, "greater than zero")


@dataclass(frozen=True)
class DataConfig:
    """Text, tokenizer and batches.

    Args:
        corpus: `stdlib` (the source of Python's standard library), a folder made by `moejax data prepare`,
            or a folder, glob or file of text.
        mixture: Several corpora with weights, instead of `corpus`.
        tokenizer: `byte`, or the path of a tokenizer.json.
        sequence_length: Tokens per sequence S.
        batch_size: Sequences per optimizer step, over all devices and microbatches.
        heldout_fraction: Share of documents kept for evaluation.
        cache: Folder for token files made from raw text; null for `ROOT/.tokens` under run.root.
    """

    corpus: str = "stdlib"
    mixture: tuple[MixtureSource, ...] = ()
    tokenizer: str = "byte"
    sequence_length: int = 256
    batch_size: int = 32
    heldout_fraction: float = 0.02
    cache: str | None = None

    def __post_init__(self) -> None:
        positive("data", self, "sequence_length", "batch_size")
        require(0 < self.heldout_fraction < 1, "data.heldout_fraction", self.heldout_fraction, "between 0 and 1")
        require(
            not (self.mixture and self.corpus != "stdlib"),
            "data.mixture",
            "given",
            "left out when data.corpus is set: use one of them",
        )

    @property
    def sources(self) -> tuple[MixtureSource, ...]:
        """The mixture; a single corpus is a mixture of one."""
        return self.mixture or (MixtureSource(self.corpus),)


@dataclass(frozen=True)
class TrainConfig:
    """Length of the run.

    Args:
        steps: Optimizer steps.
        microbatches: Parts into which each device's share of a batch is cut; gradients accumulate over them.
    """

    steps: int = 200
    microbatches: int = 1

    def __post_init__(self) -> None:
        positive("train", self, "steps", "microbatches")


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule.

    Args:
        name: `adamw`, or `muon` (matrices by Muon, the rest by AdamW).
        learning_rate: Peak learning rate.
        schedule: After warm-up: `cosine`, `wsd` (constant, then linear decay) or `constant`.
        warmup_steps: Steps of linear warm-up.
        decay_fraction: Share of the run that `wsd` decays over.
        final_ratio: Learning rate at the end over the peak.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Epsilon of AdamW.
        weight_decay: Decoupled weight decay; never on norms and embeddings.
        clip_norm: Global-norm clipping; null for none.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-3
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 20
    decay_fraction: float = 0.2
    final_ratio: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        positive("optimizer", self, "learning_rate", "eps")
        not_negative("optimizer", self, "warmup_steps", "weight_decay")
        require(0 < self.decay_fraction <= 1, "optimizer.decay_fraction", self.decay_fraction, "between 0 and 1")
        require(0 <= self.final_ratio <= 1, "optimizer.final_ratio", self.final_ratio, "between 0 and 1")
        for name in ("b1", "b2"):
            require(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "at least 0 and below 1")
        require(
            self.clip_norm is None or self.clip_norm > 0,
            "optimizer.clip_norm",
            self.clip_norm,
            "greater than zero, or null",
        )


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out text.

    Args:
        every: Steps between evaluations; the last step is always evaluated.
        batches: Batches of `data.batch_size` sequences per evaluation.
    """

    every: int = 100
    batches: int = 8

    def __post_init__(self) -> None:
        positive("eval", self, "every", "batches")


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints.

    Args:
        every: Steps between checkpoints; the last step is always saved.
        keep_last: Newest checkpoints kept.
        keep_every: Also keep every checkpoint whose step is a multiple of this; null for none.
        resume: Continue from the newest checkpoint of the run.
    """

    every: int = 100
    keep_last: int = 2
    keep_every: int | None = None
    resume: bool = True

    def __post_init__(self) -> None:
        positive("checkpoint", self, "every", "keep_last")
        require(
            self.keep_every is None or (self.keep_every > 0 and self.keep_every % self.every == 0),
            "checkpoint.keep_every",
            self.keep_every,
            f"a multiple of checkpoint.every={self.every}",
        )


@dataclass(frozen=True)
class LogConfig:
    """Metrics.

    Args:
        every: Steps between logged steps.
        tensorboard: Write TensorBoard event files into the run folder.
        wandb: Log to Weights & Biases, if it is installed.
        pairs: Add `moe/pairs` to the rows of metrics.jsonl: for each MoE layer, requested routes from every rank of
            experts to every other, so that lost locality shows. Costs one small sum over devices a step.
    """

    every: int = 10
    tensorboard: bool = True
    wandb: bool = False
    pairs: bool = False

    def __post_init__(self) -> None:
        positive("log", self, "every")
