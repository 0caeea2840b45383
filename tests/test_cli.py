"""The command line: parsing, help and exit codes, without training anything."""

import argparse
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import moejax
from moejax.cli import main as frame
from moejax.errors import UserError
from moejax.options import options

FIXED_VERBS = {"data", "eval", "generate", "launch", "plan", "train"}
"""Scripts outside use these names."""
COMMANDS = [[verb] for verb in frame.verbs()] + [["launch", "local"], ["data", "prepare"]]


def moejax_cli(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moejax", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """Add a verb `try` that takes a configuration and does what its flag --how says; return the arguments it got."""
    seen: list[argparse.Namespace] = []

    def run(args: argparse.Namespace) -> int | None:
        seen.append(args)
        frame.config_from(args)
        if args.how == "crash":
            raise ValueError("a bug")
        if args.how == "interrupt":
            raise KeyboardInterrupt
        if args.how == "lines":
            raise UserError("two\n  lines")
        return int(args.how) if args.how else None

    def register(subparsers: "argparse._SubParsersAction[frame.Parser]") -> None:
        parser = subparsers.add_parser("try", help="for the test")
        frame.add_config_arguments(parser)
        parser.add_argument("--how")
        parser.set_defaults(run=run)

    module = ModuleType("moejax.cli.try")
    module.register = register  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "moejax.cli.try", module)
    monkeypatch.setattr(frame, "verbs", lambda: ["launch", "try"])
    return seen


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text("run: {name: small}\ntrain: {steps: 3}\n")
    return str(path)


def test_verbs_that_scripts_use_are_there() -> None:
    assert set(frame.verbs()) >= FIXED_VERBS


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_every_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        frame.main([*command, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: moejax {' '.join(command)}")
    assert len(out.splitlines()) > 5


def test_train_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        frame.main(["train", "--help"])
    out = capsys.readouterr().out
    assert "  --mesh.expert\n      Shards of the routed experts" in out
    assert "    model.layers[].pattern[].ffn\n      Dense SwiGLU, or a mixture of experts." in out
    assert all(f"  --{option.key}\n" in out for option in options())
    words = " ".join(out.split())
    assert "(an integer; default 1)" in words
    assert "(one of step, microbatch, layer; default step)" in words
    assert "(a number, or null; default null)" in words
    assert "{repeat: 3, pattern: [{ffn: moe, window: null}]}" in words


def test_overrides_in_both_forms_and_any_place(verb: list[argparse.Namespace], config: str) -> None:
    line = ["try", "--mesh.expert", "4", config, "--how=7", "--train.steps=5", "--run.name=a=b", "--data.corpus", "-x"]
    assert frame.main(line) == 7
    assert verb[0].config == config
    assert verb[0].overrides == ["mesh.expert=4", "train.steps=5", "run.name=a=b", "data.corpus=-x"]
    read = frame.config_from(verb[0])
    assert (read.mesh.expert, read.train.steps, read.run.name, read.data.corpus) == (4, 5, "a=b", "-x")


@pytest.mark.parametrize(("how", "code"), [("0", 0), ("3", 3), ("75", 75), ("interrupt", 130), ("lines", 2)])
def test_exit_codes(verb: list[argparse.Namespace], config: str, how: str, code: int) -> None:
    assert frame.main(["try", config, f"--how={how}"]) == code


def test_no_exit_code_is_success(verb: list[argparse.Namespace], config: str) -> None:
    assert frame.main(["try", config]) == 0


def test_a_bug_keeps_its_traceback(verb: list[argparse.Namespace], config: str) -> None:
    with pytest.raises(ValueError, match="a bug"):
        frame.main(["try", config, "--how=crash"])


def test_a_user_error_is_one_line(
    verb: list[argparse.Namespace], config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    frame.main(["try", config, "--how=lines"])
    captured = capsys.readouterr()
    assert captured.err == "error: two lines\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "the following arguments are required: COMMAND; see moejax --help"),
        (["lunch"], "'lunch': no such command; did you mean 'launch'?"),
        (["try"], "the following arguments are required: CONFIG; see moejax try --help"),
        (["try", "CONFIG", "--mesh.exprt=4"], "mesh.exprt: no such option; did you mean 'mesh.expert'?"),
        (["try", "CONFIG", "--steps=4"], "--steps=4: no such argument; did you mean '--train.steps'?"),
        (["try", "CONFIG", "--hw", "4"], "--hw 4: no such argument; did you mean '--how'?"),
        (["try", "CONFIG", "--train.steps"], "--train.steps: needs a value, as in --train.steps=value"),
        (["try", "CONFIG", "--train.steps", "--how=1"], "--train.steps: needs a value"),
        (["try", "nowhere.yaml"], "nowhere.yaml: no such configuration file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_command_lines(
    verb: list[argparse.Namespace], config: str, line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert frame.main([config if item == "CONFIG" else item for item in line]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_overrides_are_refused_where_no_configuration_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["launch", "local", "--processes=2", "--mesh.expert=2", "--", "train", "x"]) == 2
    assert "takes no configuration options" in capsys.readouterr().err


def test_what_follows_two_dashes_is_left_alone() -> None:
    line = ["launch", "--a.b", "1", "--", "train", "c", "--mesh.expert=2", "--", "x"]
    assert frame.split_command_line(line) == (["launch"], ["a.b=1"], ["train", "c", "--mesh.expert=2", "--", "x"])


def test_two_dashes_are_refused_where_nothing_may_follow(
    verb: list[argparse.Namespace], config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert frame.main(["try", config, "--", "train"]) == 2
    assert "'moejax try' takes nothing after --" in capsys.readouterr().err


def test_launch_wants_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["launch", "local", "--processes=2"]) == 2
    assert "no command to start: write it after --" in capsys.readouterr().err


def test_module_equals_command() -> None:
    script = Path(sys.executable).with_name("moejax")
    assert script.exists(), "install the package first: make setup"
    for arguments, code in ((["--version"], 0), (["--help"], 0), (["trian"], 2)):
        by_module = moejax_cli(*arguments)
        by_script = subprocess.run([script, *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert by_module.returncode == by_script.returncode == code
        assert (by_module.stdout, by_module.stderr) == (by_script.stdout, by_script.stderr)
    assert moejax_cli("--version").stdout == f"moejax {moejax.__version__}\n"


def test_help_and_configuration_import_no_jax() -> None:
    program = (
        "import sys, moejax\n"
        "from moejax.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "moejax.load_config(None, ['mesh.expert=2'])\n"
        "assert not {'jax', 'flax', 'grain', 'orbax'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for name in FIXED_VERBS:
        assert f"\n    {name} " in done.stdout


def test_crash_of_a_process_has_code_1() -> None:
    program = (
        "import sys\nfrom moejax.cli import main as frame\n"
        "def broken(arguments): raise ValueError('a bug')\n"
        "frame.split_command_line = broken\nsys.exit(frame.main([]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_output_into_a_closed_pipe_ends_quietly() -> None:
    command = f"{sys.executable} -m moejax train --help | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr


def test_unknown_name_of_the_package() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trianer'"):
        _ = moejax.Trianer
