"""Compiling a run's training step for a machine that is not there."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from moejax.axes import AXES
from moejax.config import Config
from moejax.errors import UserError
from moejax.kernels import target as kernel_target
from moejax.plan.hlo import Collective, collectives
from moejax.plan.target import Target
from moejax.train.program import Program


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a training step.

    Attributes:
        seconds: Time that compiling took.
        arguments: Bytes of the arguments on one device: main weights, optimizer state, batch.
        outputs: Bytes of the outputs that do not reuse an argument's memory.
        temporaries: Bytes of temporaries at their peak.
        code: Bytes of the program itself.
        flops: Floating-point operations of one device, as the compiler counts them (a loop's body once);
            None where it does not.
        collectives: Every collective, with trip counts.
    """

    seconds: float
    arguments: int
    outputs: int
    temporaries: int
    code: int
    flops: float | None
    collectives: tuple[Collective, ...]

    @property
    def peak(self) -> int:
        """Bytes on one device while the step runs."""
        return self.arguments + self.outputs + self.temporaries

    def memory(self) -> dict[str, int]:
        """For JSON."""
        found = asdict(self)
        return {key: found[key] for key in ("arguments", "outputs", "temporaries", "code")} | {"peak": self.peak}


def compile_step(config: Config, target: Target) -> Compiled:
    """Compile the training step for the configuration's mesh on a target.

    Raises:
        UserError: The compiler for the target is not installed, or the target has no such number of devices.
    """
    mesh = Mesh(np.asarray(_devices(target, config.mesh.size)).reshape(config.mesh.shape), AXES, axis_types=_AUTO)
    started = time.monotonic()
    with kernel_target(target.platform, target.device_kind):
        program = Program(config, mesh)
        lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    try:
        compiled = lowered.compile()
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error) or "Ran out of memory" in str(error):
            raise UserError(f"{target.name}: the step does not fit: {_first_lines(str(error))}") from error
        raise
    memory, costs, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
    assert memory is not None, "every compiler that is named here analyses memory"
    assert text is not None
    return Compiled(
        time.monotonic() - started,
        memory.argument_size_in_bytes,
        max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0),
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        costs.get("flops") if costs else None,
        tuple(collectives(text)),
    )


_AUTO = (AxisType.Auto,) * len(AXES)


def _first_lines(text: str) -> str:
    return " ".join(text.split())[:400]


def _devices(target: Target, count: int) -> Sequence[Any]:
    """Described devices of the target, in the order of its topology."""
    if target.platform == "cpu":
        devices = jax.devices("cpu")
        if len(devices) < count:
            raise UserError(f"{target.name}: {count} simulated devices are needed, there are {len(devices)}")
        return devices[:count]
    needs, extra = ("libtpu", "tpu") if target.platform == "tpu" else ("jax_cuda13_plugin", "gpu")
    if find_spec(needs) is None:
        raise UserError(f"--compile for {target.name} needs its compiler: pip install 'moejax[{extra}]'")
    if target.platform == "tpu":
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # it describes chips, and takes none
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # nor does it ask whether this is a TPU VM
        topology = topologies.get_topology_desc(target.topology(count), platform="tpu")
    else:
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the plugin asks for a driver otherwise
        shape = f"1x{count}x1"
        topology = topologies.get_topology_desc(
            target.name, platform="cuda", target_config=target.compiler_config(), topology=shape
        )
    if len(topology.devices) != count:
        raise UserError(f"{target.name}: its topology has {len(topology.devices)} devices, not {count}")
    return topologies.make_mesh(topology, (count,), ("all",)).devices.reshape(-1).tolist()
