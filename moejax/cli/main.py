"""The frame of the command line. Exit codes: 0 done, 2 bad input, 1 crash, 130 interrupted; a verb may return others.

A verb is a file of this folder with `register(subparsers)`, which adds a parser and sets its default `run`, a
function from the parsed arguments to an exit code (or None). Verbs import JAX inside `run`, so that help is quick.
A verb with the default `takes_after` gets what follows `--` as `args.after`.
"""

import argparse
import os
import pkgutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import moejax
from moejax import cli
from moejax.errors import UserError, nearest

if TYPE_CHECKING:
    from moejax.config import Config

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Reports bad arguments as `UserError`; its help lists every configuration option where they are taken."""

    takes_config = False

    def error(self, message: str) -> NoReturn:
        """Raise the message, with the nearest flag for an unknown one."""
        before, unrecognized, flag = message.partition("unrecognized arguments: ")
        if unrecognized and not before:
            message = f"{flag}: no such argument{self._nearest(flag.partition(' ')[0].partition('=')[0])}"
        raise UserError(f"{message}; see {self.prog} --help")

    def _nearest(self, flag: str) -> str:
        parsers = list(self._family())
        flags = [known for parser in parsers for known in parser._option_string_actions if known.startswith("--")]
        if any(parser.takes_config for parser in parsers):
            from moejax.options import options

            keys = [option.key for option in options()]
            same = [key for key in keys if key.rpartition(".")[2] == flag.lstrip("-")]
            if same:
                return f"; did you mean '--{same[0]}'?"
            flags += [f"--{key}" for key in keys]
        return nearest(flag, flags)

    def _family(self) -> "Iterator[Parser]":
        """Yield this parser and those of its subcommands: argparse reports unknown flags at the top."""
        yield self
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._family()

    def format_help(self) -> str:
        """Return argparse's help, followed by the configuration options."""
        return super().format_help() + ("\n" + _options_help() if self.takes_config else "")


def add_config_arguments(parser: argparse.ArgumentParser, metavar: str = "CONFIG") -> None:
    """Let a verb take a configuration and dotted overrides; `config_from` reads them.

    Args:
        parser: Parser of the verb, made by `subparsers.add_parser`.
        metavar: Name of the positional argument; it lands in `args.config`.
    """
    assert isinstance(parser, Parser)
    parser.takes_config = True
    parser.add_argument(
        "config", metavar=metavar, help="YAML file, or the folder of a run; any option below may follow, as --key=value"
    )
    parser.set_defaults(takes_config=True)


def config_from(args: argparse.Namespace) -> "Config":
    """Return the configuration that the arguments name, overrides applied. Raises `UserError`."""
    from moejax.configure import load_config

    return load_config(args.config, args.overrides)


def run_config_from(args: argparse.Namespace) -> "Config":
    """Like `config_from`, where the argument names a run: its folder stays usable when it was moved or renamed."""
    if os.path.isdir(args.config):
        root, name = os.path.split(os.path.abspath(args.config))
        args.overrides = [f"run.root={root}", f"run.name={name}", *args.overrides]
    return config_from(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line, without the program's name; return its exit code."""
    try:
        arguments, overrides, after = split_command_line(sys.argv[1:] if argv is None else argv)
        args = _parser(arguments).parse_args(arguments)
        args.overrides, args.after = overrides, after
        if overrides and not getattr(args, "takes_config", False):
            raise UserError(f"--{overrides[0]}: 'moejax {args.verb}' takes no configuration options; see --help")
        if after and not getattr(args, "takes_after", False):
            raise UserError(f"-- {' '.join(after)}: 'moejax {args.verb}' takes nothing after --; see --help")
        return args.run(args) or 0
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as in `moejax plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def split_command_line(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Split a command line into its plain arguments, its dotted overrides (as `key=value`), and what follows `--`.

    Every flag with a dot in its name is an override, written `--a.b=value` or `--a.b value`.

    Raises:
        UserError: An override without a value.
    """
    plain: list[str] = []
    overrides: list[str] = []
    items = iter(argv)
    for item in items:
        flag, equals, value = item.partition("=")
        if item == "--":
            break
        if not (flag.startswith("--") and "." in flag):
            plain.append(item)
            continue
        if not equals:
            value = next(items, "--")
            if value.startswith("--"):
                raise UserError(f"{flag}: needs a value, as in {flag}=value")
        overrides.append(f"{flag.removeprefix('--')}={value}")
    return plain, overrides, list(items)


def verbs() -> list[str]:
    """Return the verbs: the files of this folder, but those with an underscore, which are parts of a verb."""
    names = (module.name for module in pkgutil.iter_modules(cli.__path__))
    return sorted(name for name in names if name != "main" and "_" not in name)


def _parser(arguments: Sequence[str]) -> Parser:
    """Build the parser. With a verb given, only that verb's file is imported."""
    parser = Parser(
        prog="moejax",
        description="Train sparse mixture-of-experts language models in JAX.",
        epilog="Start with: moejax train configs/quickstart.yaml",
    )
    parser.add_argument("--version", action="version", version=f"moejax {moejax.__version__}")
    known = verbs()
    verb = next((item for item in arguments if not item.startswith("-")), None)
    if verb is not None and verb not in known:
        raise UserError(f"'{verb}': no such command{nearest(verb, known)} (known: {', '.join(known)})")
    subparsers = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True, parser_class=Parser)
    for name in known if verb is None else [verb]:
        import_module(f"moejax.cli.{name}").register(subparsers)
    return parser


def _options_help() -> str:
    """Return every option of a run with its text, type and default, one section after the other."""
    from moejax.options import Option, element, options, wanted

    lines: list[str] = []

    def add(option: Option, flag: str) -> None:
        default = "must be given" if option.default is MISSING else f"default {_shown(option.default)}"
        text = f"{option.help} ({wanted(option.hint)}; {default})"
        lines.extend(
            [f"  {flag}{option.key}", *textwrap.wrap(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)]
        )
        for inner in options(element(option.hint), f"{option.key}[].") if element(option.hint) else ():
            add(inner, "  ")

    sections: dict[str, list[Option]] = {}
    for option in options():
        sections.setdefault(option.key.rpartition(".")[0], []).append(option)
    for section, members in sections.items():
        lines.append(f"\n{section}:")
        for option in members:
            add(option, "--")
    return "configuration options:\n" + "\n".join(lines).lstrip("\n") + "\n"


def _shown(value: Any) -> str:
    """Write a default as one would type it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    return _shown(vars(value)) if hasattr(value, "__dict__") else str(value)
