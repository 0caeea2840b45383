"""Reading a run's configuration: a YAML file and dotted overrides in, a checked `Config` out, and back.

jsonargparse converts and checks values; what comes first here is what users meet most: unknown keys, empty
values and overrides. Every problem is one `UserError` of one line that names the key. Imports no JAX.
"""

import re
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from moejax.config import Config
from moejax.errors import UserError, nearest
from moejax.options import is_optional, options, wanted, without_none


def shipped(path: Path) -> Path:
    """A file or folder of `configs/`: as it stands, else in the clone or the installed package of this code."""
    if path.exists() or path.is_absolute() or path.parts[:1] != ("configs",):
        return path
    here = Path(__file__).parent
    return next((place / path for place in (here.parent, here) if (place / path).exists()), path)


def load_config(path: str | PathLike[str] | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration.

    Args:
        path: YAML file, or a run folder with `config.yaml` in it; None for the defaults of every option. A file
            of `configs/` that is not in the current folder is the one that came with this code.
        overrides: Dotted settings such as `"mesh.expert=4"`; later ones win.

    Raises:
        UserError: The file is missing or no YAML, a key is unknown, or a value has the wrong type or range.
    """
    document: dict[str, Any] = {} if path is None else _read(shipped(Path(path)))
    for override in overrides:
        _apply(document, override)
    return _build(_checked(document, Config, ""))


def dump_config(config: Config) -> str:
    """Return every option of `config` as YAML that `load_config` reads back to an equal `Config`."""
    return yaml.safe_dump(_plain(asdict(config)), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping: the first one would have no effect."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key.value}' stands twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        if not (path / "config.yaml").is_file():
            raise UserError(f"{path}: this folder has no config.yaml; give a YAML file or the folder of a run")
        path = path / "config.yaml"
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        known = [item.name for item in path.parent.glob("*.yaml")]
        raise UserError(f"{path}: no such configuration file{nearest(path.name, known)}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(f"{path}: cannot be read ({reason}); give a YAML file") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "not YAML"
        where = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{where}: {problem}; write 'section:' with indented 'key: value' lines") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UserError(f"{path}: must hold sections such as 'mesh:' with indented 'key: value' lines")
    if set(document) == {"description"}:
        raise UserError(f"{path}: describes a model that the trainer cannot build yet; see 'moejax params {path}'")
    return document


def _apply(document: dict[str, Any], override: str) -> None:
    """Set one `a.b=value` in `document`, in place."""
    key, equals, text = override.removeprefix("--").partition("=")
    if not equals or not key:
        raise UserError(f"override '{override}': must look like section.key=value")
    parts = key.split(".")
    hint = _hint(parts)
    node = document
    for depth, part in enumerate(parts[:-1], 1):
        inner = node.setdefault(part, {})
        if not isinstance(inner, dict):
            raise _wrong(".".join(parts[:depth]), inner, _hint(parts[:depth]))
        node = inner
    node[parts[-1]] = _value(key, text, hint)


def _value(key: str, text: str, hint: Any) -> Any:
    if without_none(hint) is str:
        return None if is_optional(hint) and text == "null" else text
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise _wrong(key, text, hint) from None


def _hint(parts: Sequence[str]) -> Any:
    """Return the type of the option or section at a dotted key."""
    hint: Any = Config
    for depth, part in enumerate(parts):
        before = ".".join(parts[:depth])
        if is_dataclass(hint):
            _known(part, hint, before + "." if before else "")  # type: ignore[arg-type]
            hint = get_type_hints(hint)[part]
        elif get_origin(hint) is dict:
            hint = get_args(hint)[1]
        else:
            raise UserError(f"{'.'.join(parts)}: {before} is {wanted(hint)}; set {before} as a whole")
    return hint


def _known(name: object, section: type, prefix: str) -> None:
    """Raise if `name` is no key of `section`, naming the nearest key here, or the option of that name elsewhere."""
    names = [item.name for item in fields(section)]
    if name in names:
        return
    elsewhere = [option.key for option in options() if option.key.rpartition(".")[2] == name]
    hint = nearest(str(name), names).replace("'", f"'{prefix}", 1)
    if not hint and elsewhere:
        hint = f"; did you mean '{elsewhere[0]}'?"
    raise UserError(f"{prefix}{name}: no such option{hint or '; known here: ' + ', '.join(names)}")


def _checked(value: Any, hint: Any, key: str) -> Any:
    """Return `value` with the word `none` as null; raise on unknown keys, and on null where none is allowed."""
    inner = without_none(hint)
    if is_optional(hint) and (value is None or str(value).lower() == "none"):
        return None
    if is_dataclass(inner):
        if not isinstance(value, dict):
            raise _wrong(key, value, hint)
        prefix = f"{key}." if key else ""
        for name in value:
            _known(name, inner, prefix)  # type: ignore[arg-type]
        for item in fields(inner):  # type: ignore[arg-type]
            if item.name not in value and item.default is MISSING and item.default_factory is MISSING:
                raise UserError(f"{prefix}{item.name}: must be given")
            if not value and item.default is not MISSING:  # in lists, jsonargparse refuses an empty mapping
                value = {item.name: item.default}
        hints = get_type_hints(inner)
        return {name: _checked(item, hints[name], prefix + name) for name, item in value.items()}
    if get_origin(inner) is tuple and isinstance(value, list):
        return [_checked(item, get_args(inner)[0], f"{key}[{index}]") for index, item in enumerate(value)]
    if get_origin(inner) is dict and isinstance(value, dict):
        return {name: _checked(item, get_args(inner)[1], f"{key}.{name}") for name, item in value.items()}
    if value is None or (isinstance(value, bool) and inner in (int, float)):
        raise _wrong(key, value, hint)
    return value


def _wrong(key: str, value: object, hint: Any) -> UserError:
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    return UserError(f"{key}={shown}: must be {wanted(hint)}")


@cache
def _parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Config)
    return parser


def _build(document: dict[str, Any]) -> Config:
    parser = _parser()
    try:
        values = parser.instantiate(parser.parse_object(document))
    except ArgumentError as error:
        raise _one_line(str(error), document) from None
    return Config(**{item.name: values[item.name] for item in fields(Config)})


def _one_line(message: str, document: dict[str, Any]) -> UserError:
    """Turn a report of jsonargparse into one line with the key, the value and what is wanted."""
    parts = ".".join(re.findall(r'Parser key "([^"]+)"', message)).split(".")
    hint: Any = Config
    value: Any = document
    try:
        for part in parts:
            hint = get_type_hints(_element(hint))[part]
            value = value[part] if isinstance(value, dict) else None
    except (KeyError, TypeError):
        return UserError(" ".join(message.split()))
    if value is None:  # inside a list, where the report alone says which value it was
        value = re.findall(r"(?:Got|Given) value: (.*)", message)[-1]
    return _wrong(".".join(parts), value, hint)


def _element(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is tuple else hint
