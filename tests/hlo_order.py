"""Collectives of a compiled program whose order no data decides."""

import re
from functools import cache

from moejax.plan.hlo import collectives


def _instructions(text: str) -> dict[str, dict[str, str]]:
    """Of each computation, name and text of its instructions; `entry` is the entry."""
    found: dict[str, dict[str, str]] = {}
    name = ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-~]+) (?:\(.*)?\{\s*$", line):
            name = "entry" if header[1] else header[2]
            found[name] = {}
        elif one := re.match(r"\s+(?:ROOT )?%?([\w.\-~]+) = (.*)", line):
            found[name][one[1]] = one[2]
    return found


def unordered(text: str, kind: str = "all-reduce") -> set[tuple[str, str]]:
    """Pairs of a branch with collectives of `kind` and an instruction beside it with some of the same groups, neither
    of which needs the other's result."""
    computations = _instructions(text)

    @cache
    def groups(line: str) -> frozenset[str]:
        if f" {kind}(" in line:
            (one,) = collectives(f"ENTRY e {{\n  x = {line}\n}}\n")
            return frozenset([str(one.groups)]) if one.group_size > 1 else frozenset()
        called = re.findall(r"(?:calls|to_apply|body|\w+_computations?)=(\{[^}]*\}|%?[\w.\-~]+)", line)
        names = [name for names in called for name in re.findall(r"[\w.\-~]+", names)]
        return frozenset().union(*(groups(inner) for name in names for inner in computations.get(name, {}).values()))

    found = set()
    for lines in computations.values():
        needs: dict[str, set[str]] = {}
        for name, line in lines.items():  # operands stand before their users
            operands = set(re.findall(r"[\w.\-~]+", line)) & set(needs)
            needs[name] = operands.union(*(needs[operand] for operand in operands))
        moving = [name for name, line in lines.items() if groups(line)]
        for branch in (name for name in moving if " conditional(" in lines[name]):
            found |= {
                (branch, other)
                for other in moving
                if other != branch and groups(lines[branch]) & groups(lines[other])
                if other not in needs[branch] and branch not in needs[other]
            }
    return found
