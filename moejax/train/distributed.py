"""Starting JAX for a run: simulated devices on a machine without accelerators, and joining the other processes.

Everything here must happen before JAX's first backend starts; nothing needs an environment variable set by hand.
"""

import contextlib
import importlib.util
import os
import re
from pathlib import Path

import jax
from jax.sharding import Mesh

from moejax.axes import AXES
from moejax.config import Config
from moejax.errors import UserError
from moejax.sharding import make_mesh

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "MOEJAX_COORDINATOR", "MOEJAX_NUM_PROCESSES", "MOEJAX_PROCESS_ID"
"""Set by `moejax launch local` for each process: HOST:PORT of process 0, how many there are, which one this is."""

PEER_TIMEOUT_SECONDS = 20
"""A process that has not been heard of for this long is taken for dead, and the others end."""


_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def start(config: Config) -> Mesh:
    """Join the run's other processes, make sure that there are as many devices as the mesh has, and return the mesh.

    On a machine without accelerators the devices are simulated, `config.mesh.size` over all processes. Calling it
    again is allowed as long as the mesh fits into the devices that already run; it takes the first of them.

    Raises:
        UserError: The mesh does not fit the machine, or JAX already runs with too few devices.
    """
    if not jax.distributed.is_initialized():
        _join()
    _simulate(config)
    _check(config)
    return make_mesh(config.mesh, jax.devices()[: config.mesh.size])


def _join() -> None:
    """Call `jax.distributed.initialize` where the environment says that this process is one of several."""
    timeouts = {"heartbeat_timeout_seconds": PEER_TIMEOUT_SECONDS, "shutdown_timeout_seconds": PEER_TIMEOUT_SECONDS}
    if int(os.environ.get(NUM_PROCESSES, "1")) > 1:
        if missing := [name for name in (COORDINATOR, PROCESS_ID) if name not in os.environ]:
            raise UserError(f"{NUM_PROCESSES} is set but {', '.join(missing)} is not: set all three, or none")
        coordinator, count, index = (os.environ[name] for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID))
        _initialize(coordinator_address=coordinator, num_processes=int(count), process_id=int(index), **timeouts)
    elif _in_cluster():
        _initialize(**timeouts)


def _initialize(**options: object) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**options)  # type: ignore[arg-type]
    except RuntimeError as error:
        if "before" not in str(error):
            raise
        raise UserError(
            "JAX already runs in this interpreter, so it cannot join the other processes: "
            "make the Trainer before any other use of JAX"
        ) from None


def _in_cluster() -> bool:
    """Return whether a cluster that JAX can detect runs several processes: SLURM, Kubernetes or TPU pods.

    Kubernetes counts when the pod belongs to an indexed Job, as those of a JobSet do. A SLURM allocation without
    `srun` runs one process, whatever number of tasks it reserved.
    """
    env = os.environ
    slurm = int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    kubernetes = "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env
    return slurm or kubernetes or _on_tpu_vm()


def _on_tpu_vm() -> bool:
    """Return whether this is a TPU VM, whose metadata tells of the other hosts; notebooks have no such metadata."""
    chips = any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    notebook = "COLAB_RELEASE_TAG" in os.environ or "TPU_SKIP_MDS_QUERY" in os.environ
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    return chips and not notebook and not on_cpu and importlib.util.find_spec("libtpu") is not None


def _simulate(config: Config) -> None:
    """Set the number of CPU devices. It concerns the CPU backend alone, so it is harmless next to accelerators."""
    size = config.mesh.size
    processes = int(os.environ.get(NUM_PROCESSES) or os.environ.get("SLURM_STEP_NUM_TASKS") or 1)
    if _FLAG.search(os.environ.get("XLA_FLAGS", "")):
        return  # the user's own choice of the same thing; _check compares it with the mesh
    if size % processes:
        raise UserError(f"a mesh of {size} devices cannot be shared by {processes} processes: use a divisor of {size}")
    with contextlib.suppress(RuntimeError):  # a backend runs already; _check says whether it will do
        jax.config.update("jax_num_cpu_devices", size // processes)


def _check(config: Config) -> None:
    have, want = jax.device_count(), config.mesh.size
    if have == want:
        return
    axes = ", ".join(f"{axis}={n}" for axis, n in zip(AXES, config.mesh.shape, strict=True) if n > 1) or "one device"
    if jax.default_backend() != "cpu":
        raise UserError(
            f"the mesh ({axes}) has {want} devices but there are {have} of {jax.devices()[0].device_kind}: "
            f"set mesh.data and mesh.expert so that the product of the mesh's sizes is {have}"
        )
    if have > want and jax.process_count() == 1:
        return  # the mesh takes the first devices
    if flag := _FLAG.search(os.environ.get("XLA_FLAGS", "")):
        raise UserError(f"the mesh ({axes}) needs {want} devices but XLA_FLAGS sets {flag[1]}: take that flag out")
    raise UserError(
        f"the mesh ({axes}) needs {want} simulated devices but JAX already runs with {have}: "
        "restart the interpreter, or make the Trainer with the largest mesh first"
    )
