"""What a trace of training steps says: time by named scope, and what of it is model time and what is tax."""

import gzip
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from moejax.errors import UserError
from moejax.plan.hlo import KINDS
from moejax.plan.show import make_console, make_table
from moejax.plan.text import of_seconds
from moejax.train.measure import HLO_FILE, STEPS_FILE

MODEL, CAPACITY, RUNTIME = "model time", "capacity tax", "runtime tax"

SCOPES = {
    **dict.fromkeys(("embed", "attention", "ffn", "experts", "shared", "dense", "head"), MODEL),
    **dict.fromkeys(("gather", "reduce", "update"), CAPACITY),
    **dict.fromkeys(
        ("route", "plan", "dispatch", "combine", "statistics", "prepass", "pipeline", "tensor", "quantize"), RUNTIME
    ),
}
"""Named scopes of a step and what they are (report, table 2 and equation 6): the capacity tax follows all parameters
(weights, gradients, updates), the runtime tax is routing and what else runs beside the model."""

OTHER = "other"
"""Operations in none of the scopes: copies, loops, sums over microbatches. They count as runtime tax."""

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-~]+) = .*? ([a-z][\w\-]*)\(")
_CONTAINERS = frozenset({"while", "call", "conditional", "async-start", "async-update", "async-done"})
"""Instructions whose time is that of others inside them."""


@dataclass(frozen=True)
class Trace:
    """A trace, summed up. Times are of one device and step.

    Attributes:
        first: First step.
        last: Last step.
        devices: Devices that were traced.
        device_kind: As JAX names it.
        wall: Seconds from the start of the first operation to the end of the last.
        busy: Seconds of operations by scope, most first; those that run side by side count each.
        backward: The part of `busy` that belongs to backward passes.
        moving: The part of `busy` that is collectives; they include waiting for the other devices.
    """

    first: int
    last: int
    devices: int
    device_kind: str
    wall: float
    busy: dict[str, float]
    backward: dict[str, float]
    moving: dict[str, float]

    def kinds(self) -> dict[str, float]:
        """Seconds of model time and of each tax."""
        found: dict[str, float] = {MODEL: 0.0, CAPACITY: 0.0, RUNTIME: 0.0}
        for scope, seconds in self.busy.items():
            found[kind_of(scope)] += seconds
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"kinds": self.kinds()}


def kind_of(scope: str) -> str:
    """Whether a scope is model time or a tax."""
    return SCOPES.get(scope, RUNTIME)


def scope_of(op_name: str) -> str:
    """Innermost known scope of an operation's name, as in `jit(step)/transpose(jvp(ffn))/dispatch/all_to_all`."""
    for part in reversed(op_name.split("/")[:-1]):  # the last part is the primitive, and one is called gather
        for word in re.findall(r"\w+", part):
            if word in SCOPES:
                return word
    return OTHER


def instructions(text: str) -> dict[str, tuple[str, str]]:
    """Name to (operation, its name in JAX) of every instruction of an HLO text that is no container of others."""
    found = {}
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match and match[2] not in _CONTAINERS:
            name = re.search(r'op_name="([^"]*)"', line)
            found[match[1]] = (match[2], name[1] if name else "")
    return found


def read_trace(folder: str) -> Trace:
    """Sum up the newest trace of a run, or of a folder that holds one.

    Raises:
        UserError: There is no trace, or none that `moejax train --profile` wrote.
    """
    place = Path(folder, "profile") if Path(folder, "profile").is_dir() else Path(folder)
    files = sorted(place.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise UserError(f"{folder}: no trace in there; make one with: moejax train CONFIG --profile 10:12")
    try:
        text = gzip.decompress((place / HLO_FILE).read_bytes()).decode()
        about = json.loads((place / STEPS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"{place}: no {HLO_FILE} and {STEPS_FILE} beside the trace, which say what its operations are; name a "
            "folder that 'moejax train --profile' wrote"
        ) from None
    with warnings.catch_warnings():  # JAX's reader makes types without a module, which Python 3.12 does not like
        warnings.simplefilter("ignore", DeprecationWarning)
        return _sum(ProfileData.from_file(str(files[-1])), text, about)


def _sum(data: Any, text: str, about: Mapping[str, Any]) -> Trace:
    known, module = instructions(text), re.search(r"HloModule ([\w.\-~]+)", text)
    steps = about["last"] - about["first"] + 1
    busy, backward, moving = defaultdict(float), defaultdict(float), defaultdict(float)
    first, last = float("inf"), 0.0
    share = 1 / (steps * about["devices"])
    for name, start, seconds in _operations(data, module[1] if module else ""):
        if name not in known:
            continue
        kind, op_name = known[name]
        scope = scope_of(op_name)
        busy[scope] += share * seconds
        backward[scope] += share * seconds if "transpose(" in op_name else 0.0
        moving[scope] += share * seconds if kind.removesuffix("-start").removesuffix("-done") in KINDS else 0.0
        first, last = min(first, start), max(last, start + seconds)
    if not busy:
        raise UserError("the trace holds no operation of the compiled step: trace again, with later steps")
    facts = (about["first"], about["last"], about["devices"], about["device_kind"], (last - first) / steps)
    ordered = dict(sorted(busy.items(), key=lambda item: -item[1]))
    return Trace(*facts, ordered, dict(backward), dict(moving))


def _operations(data: Any, module: str) -> Iterator[tuple[str, float, float]]:
    """Name of the instruction, start and duration in seconds of everything that devices ran.

    Simulated devices run on threads of the host's plane; accelerators have planes of their own.
    """
    planes = list(data.planes)
    chips = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in chips or planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if stats.get("hlo_module", module) != module:
                    continue
                name = stats.get("hlo_op") or (event.name.partition(" ")[0].lstrip("%") if chips else "")
                if name:
                    yield str(name), event.start_ns / 1e9, event.duration_ns / 1e9


def show_trace(trace: Trace) -> None:
    """Print the table of a trace."""
    console = make_console()
    title = f"steps {trace.first} to {trace.last} on {trace.devices} x {trace.device_kind}: time of one device and step"
    table = make_table(title, "scope", "what it is", "time", "share of the step", "backward", "collectives", left=2)

    def add(name: str, kind: str, seconds: float, *rest: float) -> None:
        table.add_row(name, kind, of_seconds(seconds), f"{seconds / trace.wall:.1%}", *map(of_seconds, rest))

    for scope, seconds in trace.busy.items():
        add(scope, kind_of(scope), seconds, trace.backward[scope], trace.moving[scope])
    table.add_section()
    for kind, seconds in trace.kinds().items():
        add(kind, "", seconds)
    if (idle := trace.wall - sum(trace.busy.values())) > 0:
        add("no operation", "", idle)
    table.add_section()
    add("step", "", trace.wall)
    console.print(table)
    console.print("collectives include waiting for other devices; operations that run side by side count each")
