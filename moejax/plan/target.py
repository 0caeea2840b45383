"""Machines: peaks, memory and links of one device, from small files."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

import yaml

from moejax.errors import UserError, nearest
from moejax.plan.hlo import wire_fraction

_FILES = resources.files("moejax.plan").joinpath("targets")


@dataclass(frozen=True)
class Link:
    """A network among devices.

    Attributes:
        bandwidth: Bytes per second that one device sends.
        devices: Devices that it joins, consecutive ones; None for all.
    """

    bandwidth: float
    devices: int | None = None


@dataclass(frozen=True)
class Target:
    """A kind of machine. All figures are of one device.

    Attributes:
        name: Name of its file.
        platform: As JAX names it.
        device_kind: As JAX names it; kernels are chosen by it.
        peak: FLOP per second by precision, dense.
        memory: Bytes of device memory.
        bandwidth: Bytes per second of device memory.
        links: Networks, innermost first.
        topologies: Number of devices to the shape that the TPU compiler knows.
        all_reduced: Of gathers and scatters over all devices, those that libtpu 0.0.52 turns into all-reduces of the
            whole tensor, and on how many devices; they send twice as much. Independent of their order in the mesh.
        compiler: Name of the description that the CUDA compiler reads.
        shared: The figures are of the whole machine, which simulated devices share.
    """

    name: str
    platform: Literal["cpu", "gpu", "tpu"]
    device_kind: str
    peak: dict[str, float]
    memory: float
    bandwidth: float
    links: tuple[Link, ...]
    topologies: dict[int, str] | None = None
    all_reduced: dict[str, list[int]] = field(default_factory=dict)
    compiler: str | None = None
    shared: bool = False

    def share(self, devices: int) -> float:
        """Part of the machine's rates that one of `devices` devices has."""
        return 1 / devices if self.shared else 1.0

    @property
    def balance(self) -> float:
        """FLOP per byte at which bfloat16 compute and memory take equal time (report, equation 91)."""
        return self.peak["bfloat16"] / self.bandwidth

    def topology(self, devices: int) -> str:
        """Name of the topology with so many devices.

        Raises:
            UserError: There is none.
        """
        known = self.topologies or {}
        if devices not in known:
            raise UserError(f"{self.name}: no topology of {devices} devices; known: {', '.join(map(str, known))}")
        return f"{self.name}:{known[devices]}"

    def compiler_config(self) -> str:
        """Description of the device for the CUDA compiler, with this device's memory."""
        text = _FILES.joinpath(f"{self.compiler}.txtpb").read_text(encoding="utf-8")
        return re.sub(r"device_memory_size: \d+", f"device_memory_size: {int(self.memory)}", text)

    def seconds(self, kind: str, size: float, group: Sequence[int]) -> float:
        """Time of one collective if nothing else uses the links.

        Inside the innermost network a ring; what crosses to the next one goes over each device's own port, in
        equal parts. An all-to-all sends each peer its part over the innermost network that joins them.

        Args:
            kind: Operation, as HLO names it.
            size: Bytes of the whole tensor: gathered, or before it is scattered.
            group: Devices that take part.
        """
        times = 0.0
        for link, sent in zip(self.links, self.sent(kind, size, group), strict=True):
            times += sent / link.bandwidth
        return times

    def sent(self, kind: str, size: float, group: Sequence[int]) -> list[float]:
        """Bytes that a device sends over each network; together no less than a flat ring sends."""
        found, inside, rest = [], 1, size
        for link in self.links:
            members = len({device // link.devices for device in group}) if link.devices else 1
            local = len(group) // members // inside if members else 1
            if "all-to-all" in kind:
                found.append(size * (len(group) // members - inside) / len(group))
            else:
                found.append(rest * wire_fraction(kind, local) if local > 1 else 0.0)
                rest /= local
            inside *= local
        return found


def names() -> list[str]:
    """Every target."""
    return sorted(file.name.removesuffix(".yaml") for file in _FILES.iterdir() if file.name.endswith(".yaml"))


_OTHER_NAMES = {"TPU v5e": "TPU v5 lite", "TPU v5p": "TPU v5", "TPU v6e": "TPU v6 lite", "TPU v7": "TPU7x"}
"""What releases of JAX also call a kind of device."""


def target_of(device_kind: str) -> Target | None:
    """The target whose devices JAX calls by this name; None where none is, and for simulated devices."""
    kind = _OTHER_NAMES.get(device_kind, device_kind)
    found = [target for target in map(read_target, names()) if target.device_kind == kind and not target.shared]
    return found[0] if found else None


def read_target(name: str) -> Target:
    """The target of a name.

    Raises:
        UserError: There is none.
    """
    if name not in names():
        raise UserError(f"--target={name}: no such target{nearest(name, names())}; known: {', '.join(names())}")
    values: dict[str, Any] = yaml.safe_load(_FILES.joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    links = tuple(Link(**link) for link in values.pop("links"))
    return Target(name=name, links=links, **values)
