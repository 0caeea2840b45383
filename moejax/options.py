"""The options of a run as a flat list, from the dataclasses of `config/`: for help texts and error messages."""

import inspect
import re
import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moejax.config import Config


@dataclass(frozen=True)
class Option:
    """One option.

    Args:
        key: Dotted name, as in `mesh.expert`.
        hint: Its type.
        default: Its value when nobody sets it.
        help: What it does, from the docstring of its section.
    """

    key: str
    hint: Any
    default: object
    help: str


def options(section: type = Config, prefix: str = "") -> Iterator[Option]:
    """Yield every option of `section` and of the sections inside it, in the order of the dataclasses."""
    texts = argument_texts(section)
    hints = get_type_hints(section)
    for item in fields(section):
        key, hint = prefix + item.name, hints[item.name]
        if is_dataclass(hint):
            yield from options(hint, key + ".")  # type: ignore[arg-type]
        else:
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            yield Option(key, hint, default, texts.get(item.name, ""))


@cache
def argument_texts(section: type) -> dict[str, str]:
    """Return argument name to text, from the `Args:` block of a docstring (one entry a line, deeper lines go on)."""
    _, _, block = (inspect.getdoc(section) or "").partition("Args:\n")
    texts: dict[str, str] = {}
    name = ""
    for line in block.splitlines():
        if match := re.match(r" {4}(\w+): (.*)", line):
            name, texts[match[1]] = match[1], match[2]
        elif name and line.startswith(" " * 8):
            texts[name] += " " + line.strip()
    return texts


def is_optional(hint: Any) -> bool:
    """Whether `hint` allows None."""
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def element(hint: Any) -> Any:
    """Return the section that a list holds, as for `model.layers`; None for other types."""
    inner = get_args(hint)[0] if get_origin(hint) is tuple else None
    return inner if is_dataclass(inner) else None


def without_none(hint: Any) -> Any:
    """Return `X` for a hint `X | None`, any other hint as it is."""
    rest = [arg for arg in get_args(hint) if arg is not type(None)]
    return rest[0] if is_optional(hint) and len(rest) == 1 else hint


def wanted(hint: Any) -> str:
    """Say in words what values `hint` takes."""
    if is_optional(hint):
        return f"{wanted(without_none(hint))}, or null"
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is tuple:
        return f"a list, each {wanted(args[0])}"
    if origin is dict:
        return f"a mapping, each value {wanted(args[1])}"
    if is_dataclass(hint):
        return "a mapping with keys from " + ", ".join(item.name for item in fields(hint))
    return {int: "an integer", float: "a number", bool: "true or false", str: "text"}.get(hint, str(hint))
