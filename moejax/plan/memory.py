"""Memory of one device by class, from shapes alone.

Bytes per parameter (report, figure 9), with bfloat16 compute weights and AdamW over D replicas: 2 + 4 for compute
weights and gradient accumulators in compute layout, 12 / D for main weights and two moments. A replicated optimizer
makes that 18; expert parallelism over M_E ranks divides the 6 of routed experts by M_E.
"""

from collections.abc import Sequence

from moejax.config import Config
from moejax.plan.tensors import Tensor


def state_memory(config: Config, tensors: Sequence[Tensor]) -> dict[str, int]:
    """Bytes on one device of what follows from the parameters.

    Returns:
        `main weights` and `optimizer state`, which stay between steps, and of the step itself `compute weights`
        and `gradient accumulators`. With `weights.gather: step` both lie whole in compute layout; with `microbatch`
        accumulators are storage shards, beside one microbatch's gradients in compute layout; with `layer` only the
        largest layer is there at a time.
    """
    mode = config.weights.gather
    compute, gradients = 0, 0
    if mode == "layer":
        layers: dict[str, tuple[int, int]] = {}
        for tensor in tensors:
            repeat = tensor.layout.shape[0] if tensor.stacked else 1
            group = tensor.name.partition(".")[0] if tensor.stacked else ""
            so_far = layers.get(group, (0, 0))
            layers[group] = (
                so_far[0] + tensor.compute_bytes // repeat,
                so_far[1] + tensor.dtype.itemsize * tensor.compute_size // repeat,
            )
        ends = layers.pop("", (0, 0))
        largest = max(layers.values(), default=(0, 0))
        compute, gradients = ends[0] + largest[0], ends[1] + largest[1]
        gradients += sum(4 * tensor.storage_size for tensor in tensors)
    else:
        compute = sum(tensor.compute_bytes for tensor in tensors)
        gradients = sum(4 * tensor.compute_size for tensor in tensors)
        if mode == "microbatch":
            gradients = compute + sum(4 * tensor.storage_size for tensor in tensors)
    return {
        "main weights": sum(tensor.main_bytes for tensor in tensors),
        "optimizer state": sum(tensor.optimizer_bytes for tensor in tensors),
        "compute weights": compute,
        "gradient accumulators": gradients,
    }
