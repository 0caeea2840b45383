"""Every parameter with its two layouts, and what each takes on one device."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from moejax.config import Config, MeshConfig
from moejax.model.decoder import Decoder
from moejax.plan.parameters import part_of
from moejax.sharding import Layout, is_layout, make_layouts
from moejax.train.optimizer import make_optimizer
from moejax.train.state import map_like_params


@dataclass(frozen=True)
class Tensor:
    """One parameter.

    Attributes:
        name: Dotted name, as in checkpoints.
        part: Part of the model.
        layout: Shape, dims and the axes that shard it.
        dtype: Type of the compute weight.
        states: Float32 values of optimizer state for each value of the parameter.
        mesh: Sizes of the mesh axes.
    """

    name: str
    part: str
    layout: Layout
    dtype: jnp.dtype
    states: float
    mesh: MeshConfig

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.layout.shape)

    @property
    def storage_size(self) -> int:
        """Elements on one device in storage layout."""
        return self.size // self.mesh.group(self.layout.storage_axes)

    @property
    def compute_size(self) -> int:
        """Elements on one device in compute layout; with pipeline stages, of the slots of one."""
        whole = self.size // self.mesh.group([axis for axes in self.layout.compute for axis in axes])
        slots = self.layout.slots
        return whole // self.layout.shape[0] * len(slots[0]) if slots else whole

    @property
    def main_bytes(self) -> int:
        """Bytes of the float32 main weight on one device."""
        return 4 * self.storage_size

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of its optimizer state on one device."""
        return round(4 * self.states * self.storage_size)

    @property
    def compute_bytes(self) -> int:
        """Bytes of the whole compute weight on one device."""
        return self.dtype.itemsize * self.compute_size

    @property
    def stacked(self) -> bool:
        """Whether it is stacked over layers, so that `weights.gather: layer` gathers it layer by layer."""
        return self.layout.dims[0] == "layers"

    @property
    def note(self) -> str:
        """Why it is not sharded as the rules say; empty if it is."""
        if self.layout.note:
            return "replicated: " + self.layout.note
        return "" if self.layout.storage_axes or self.mesh.size == 1 else "replicated: no rule shards its dims"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "part": self.part,
            "shape": list(self.layout.shape),
            "dims": list(self.layout.dims),
            "storage_spec": spec(self.layout, storage=True),
            "compute_spec": spec(self.layout, storage=False),
            "main_bytes": self.main_bytes,
            "optimizer_bytes": self.optimizer_bytes,
            "compute_dtype": self.dtype.name,
            "compute_bytes": self.compute_bytes,
            "note": self.note,
        }


def spec(layout: Layout, storage: bool) -> list[list[str]]:
    """Mesh axes that shard each dim, in storage or in compute layout."""
    return [[*c, *(e if storage else ())] for c, e in zip(layout.compute, layout.extra, strict=True)]


def tensors(config: Config) -> list[Tensor]:
    """Every parameter of a run, in the order of its name in the tree. Needs no devices."""
    decoder = Decoder(config)
    shapes = jax.tree.map(lambda s: s.shape, decoder.shapes)
    layouts = make_layouts(decoder.dims, shapes, config)
    states = _states(config, decoder)
    found = []
    leaves = jax.tree_util.tree_leaves_with_path(layouts, is_leaf=is_layout)
    for (path, layout), num in zip(leaves, states, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        dtype = layout.dtype(decoder.dtype)
        found.append(Tensor(name, part_of(name, layout.dims), layout, dtype, num, config.mesh))
    return found


def _states(config: Config, decoder: Decoder) -> list[float]:
    """Values of optimizer state for each value of a parameter, from the optimizer's own abstract state."""
    optimizer, _ = make_optimizer(config, decoder.dims)
    names = jax.tree_util.tree_map_with_path(lambda path, _: str(path), decoder.shapes)
    state = jax.eval_shape(optimizer.init, decoder.shapes)
    owners = jax.tree.leaves(map_like_params(state, decoder.shapes, names, lambda _: ""))
    return [float(owners.count(name)) for name in jax.tree.leaves(names)]
