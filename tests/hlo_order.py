"""Collectives of a compiled program whose order no data decides."""

import re
from functools import cache

from moejax.plan.hlo import KINDS, collectives


def _instructions(text: str) -> dict[str, dict[str, str]]:
    """Of each computation, name and text of its instructions."""
    found: dict[str, dict[str, str]] = {}
    name = ""
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-~]+) (?:\(.*)?\{\s*$", line):
            name = header[1]
            found[name] = {}
        elif one := re.match(r"\s+(?:ROOT )?%?([\w.\-~]+) = (.*)", line):
            found[name][one[1]] = one[2]
    return found


def unordered(text: str) -> set[tuple[str, str, str]]:
    """A loop or branch with collectives, and an instruction beside it with such of the same kind and groups, neither of
    which needs the other's result: kind and both names."""
    computations = _instructions(text)

    @cache
    def moved(line: str) -> frozenset[tuple[str, str]]:
        if any(f" {kind}(" in line for kind in KINDS):
            (one,) = collectives(f"ENTRY e {{\n  x = {line}\n}}\n")
            alone = one.groups and one.group_size == 1
            return frozenset() if alone else frozenset([(one.kind, str(one.groups))])
        called = re.findall(r"(?:calls|to_apply|body|\w+_computations?)=(\{[^}]*\}|%?[\w.\-~]+)", line)
        names = [name for names in called for name in re.findall(r"[\w.\-~]+", names)]
        return frozenset().union(*(moved(inner) for name in names for inner in computations.get(name, {}).values()))

    found = set()
    for lines in computations.values():
        needs: dict[str, set[str]] = {}
        for name, line in lines.items():  # operands stand before their users
            operands = set(re.findall(r"[\w.\-~]+", line)) & set(needs)
            needs[name] = operands.union(*(needs[operand] for operand in operands))
        moving = [name for name, line in lines.items() if moved(line)]
        for outer in (name for name in moving if re.search(r" (conditional|while|call)\(", lines[name])):
            for other in (name for name in moving if name != outer and name not in needs[outer]):
                if outer not in needs[other]:
                    found |= {(kind, outer, other) for kind, _ in moved(lines[outer]) & moved(lines[other])}
    return found
