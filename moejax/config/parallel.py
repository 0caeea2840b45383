"""How a model runs on a mesh."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from moejax.axes import AXES, DIMS
from moejax.config.checks import not_negative, positive, require
from moejax.errors import nearest


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes, outermost first. Their product is the number of devices.

    Args:
        stage: Pipeline stages.
        data: Data-parallel replicas.
        context: Shards of the sequence.
        expert: Shards of the routed experts; also part of data parallelism.
        model: Tensor-parallel shards.
    """

    stage: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    model: int = 1

    def __post_init__(self) -> None:
        positive("mesh", self, *AXES)

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self) -> int:
        """Number of devices."""
        size = 1
        for n in self.shape:
            size *= n
        return size

    def group(self, axes: Sequence[str]) -> int:
        """Number of devices along `axes` together."""
        size = 1
        for axis in axes:
            size *= getattr(self, axis)
        return size


@dataclass(frozen=True)
class PipelineConfig:
    """How layers run over pipeline stages.

    Args:
        schedule: `1f1b` (forward and backward in turn; memory does not grow with microbatches) or `gpipe` (all
            forward, then all backward).
        virtual_stages: Chunks of layers on each stage; more of them make the bubble smaller and messages more.
        layers: Layers of each chunk, first to last, one number for each stage and virtual stage; empty to balance
            them by their FLOPs. Chunks are cut between repetitions of a pattern.
    """

    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    virtual_stages: int = 1
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        positive("pipeline", self, "virtual_stages")
        require(all(n > 0 for n in self.layers), "pipeline.layers", list(self.layers), "numbers greater than zero")


@dataclass(frozen=True)
class ContextConfig:
    """How attention runs over a sequence that is sharded over `mesh.context`.

    Args:
        attention: `ulysses` (two all-to-alls, so that each device has some heads of the whole sequence; the context
            size divides both head counts) or `ring` (keys and values go round; any size).
    """

    attention: Literal["ulysses", "ring"] = "ulysses"


@dataclass(frozen=True)
class WeightsConfig:
    """Compute weights: when storage is gathered into them, and how they are multiplied.

    Args:
        gather: `step` once per optimizer step; `microbatch` once per microbatch; `layer` in every layer,
            again in backward.
        compute: `mxfp8` quantises the matrices of attention, FFNs and experts, their inputs in forward and their
            gradients in backward, to E4M3 with a power-of-two scale per 32 values; weight gradients are as always.
            `bfloat16` is that of `model.dtype`; null is `model.dtype`, whatever it is.
        keep: With `mxfp8`, parameters or modules that are not quantised, as patterns of dotted names such as
            `*.attention` or `groups_0.*`.
        scale: With `mxfp8`, how a scale is chosen: `round_ceiling` clips nothing; `floor`, as in the OCP
            specification, clips the largest values of about a fifth of the blocks.
    """

    gather: Literal["step", "microbatch", "layer"] = "step"
    compute: Literal["bfloat16", "mxfp8"] | None = None
    keep: tuple[str, ...] = ()
    scale: Literal["round_ceiling", "floor"] = "round_ceiling"

    def __post_init__(self) -> None:
        plain = self.compute != "mxfp8"
        require(not (plain and self.keep), "weights.keep", list(self.keep), "left out without weights.compute=mxfp8")
        floor = plain and self.scale != "round_ceiling"
        require(not floor, "weights.scale", self.scale, "left out without weights.compute=mxfp8")


RematPolicy = Literal["none", "attention", "experts", "save_exchange", "full", "offload"]


@dataclass(frozen=True)
class RematConfig:
    """What backward computes again instead of keeping it.

    Args:
        policy: `none` repeats nothing; `attention` repeats attention; `experts` repeats the hidden rows of experts;
            `save_exchange` repeats all matmuls of a layer, but no exchange and no scores; `full` keeps inputs of layers
            and the chosen experts alone, and repeats the exchange; `offload` is save_exchange with what is kept in the
            memory of the host. `attention` and `experts` take less memory than `none`, the others each less than those
            before.
        groups: One policy for each entry of model.layers, instead of `policy`.
    """

    policy: RematPolicy = "save_exchange"
    groups: tuple[RematPolicy, ...] = ()

    def of(self, group: int) -> RematPolicy:
        """Policy of an entry of model.layers."""
        return self.groups[group] if self.groups else self.policy


@dataclass(frozen=True)
class ShardingConfig:
    """Sharding rules: logical dim to mesh axes. Given dims replace the default rule of that dim.

    Args:
        compute: Axes that shard a dim of the compute weights.
        storage: Further axes that shard a dim of the main weights and optimizer state.
        replicate_below: Tensors with fewer elements are not sharded in storage.
    """

    compute: dict[str, tuple[str, ...]] = field(default_factory=dict)
    storage: dict[str, tuple[str, ...]] = field(default_factory=dict)
    replicate_below: int = 4096

    def __post_init__(self) -> None:
        not_negative("sharding", self, "replicate_below")
        for column in ("compute", "storage"):
            for dim, axes in getattr(self, column).items():
                require(
                    dim in DIMS,
                    f"sharding.{column}.{dim}",
                    list(axes),
                    f"keyed by a dim, one of {', '.join(DIMS)}{nearest(dim, DIMS)}",
                )
                for axis in axes:
                    require(
                        axis in AXES,
                        f"sharding.{column}.{dim}",
                        list(axes),
                        f"a list of mesh axes, from {', '.join(AXES)}{nearest(axis, AXES)}",
                    )
