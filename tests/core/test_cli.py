"""Laws of the command line: help, exit codes, one line per user error, lazy commands."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import normplugin
from normplugin import cli
from normplugin.errors import MissingFrameworkError, NormPluginError, SchemeError

ROOT = Path(normplugin.__file__).resolve().parent.parent


def run_module(*args, cwd):
    """``python -m normplugin`` with these arguments, from a foreign folder."""
    return subprocess.run(
        [sys.executable, "-m", "normplugin", *args],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def command(monkeypatch):
    """Register a command ``fake`` whose run() is the function given; return main's exit code."""

    def call(run, *argv, doc="A fake."):
        module = types.ModuleType("normplugin_fake_command", doc)
        module.add_arguments = lambda parser: parser.add_argument("--number", type=int, default=0)
        module.run = run
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, "fake": (module.__name__, "fake")})
        return cli.main(["fake", *argv])

    return call


def test_without_arguments_it_prints_help_and_exits_2(tmp_path):
    """``python -m normplugin`` lists every command on stdout and exits 2."""
    done = run_module(cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == ""
    for name, (_, summary) in cli.COMMANDS.items():
        assert f"  {name:<10} {summary}\n" in done.stdout


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_exits_0(flag, capsys):
    """Help asked for is no error: the same overview, exit 0."""
    with pytest.raises(SystemExit) as exit_:
        cli.main([flag])
    assert exit_.value.code == 0
    assert "normplugin COMMAND [options]" in capsys.readouterr().out


def test_version_is_the_packages(capsys):
    """``--version`` prints the package's version and exits 0."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"normplugin {normplugin.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "nearest"), [("compar", "compare"), ("user_dir", "user-dir"), ("doctr", "doctor")]
)
def test_an_unknown_command_suggests_the_nearest(typed, nearest, capsys):
    """An unknown command exits 2 with one line: the legal commands and the nearest one."""
    assert cli.main([typed]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"normplugin: error: command: got '{typed}'; legal are prepare,")
    assert captured.err.endswith(f"Did you mean '{nearest}'?\n")


def test_user_dir_prints_an_existing_absolute_path(tmp_path):
    """From any folder, the one line on stdout is an existing absolute folder."""
    done = run_module("user-dir", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    path = Path(done.stdout.removesuffix("\n"))
    assert path.is_absolute()
    assert path == ROOT / "normplugin" / "fairseq_plugin"
    assert (path / "__init__.py").is_file()


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself(name, capsys):
    """``normplugin COMMAND --help`` shows its usage and exits 0."""
    with pytest.raises(SystemExit) as exit_:
        cli.main([name, "--help"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: normplugin {name} ")


def test_the_commands_exit_code_is_returned(command):
    """What run() returns is the exit code, and it gets the parsed arguments."""
    assert command(lambda args: args.number, "--number", "1") == 1
    assert command(lambda args: args.number) == 0


@pytest.mark.parametrize("error", [NormPluginError, SchemeError, MissingFrameworkError])
def test_user_errors_become_one_line(command, capsys, error):
    """An error meant for the user is one line on stderr and exit 2, without a traceback."""

    def run(args):
        raise error("--x: got 1; legal is 2. Take 2.")

    assert command(run) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "normplugin fake: error: --x: got 1; legal is 2. Take 2.\n"


def test_bugs_keep_their_traceback(command):
    """An error that is not the user's is not swallowed."""

    def run(args):
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        command(run)


def test_an_interrupt_exits_130(command, capsys):
    """Ctrl-C is one line and the shell's code for it."""

    def run(args):
        raise KeyboardInterrupt

    assert command(run) == 130
    assert capsys.readouterr().err == "normplugin fake: error: interrupted.\n"


def test_an_unknown_option_exits_2(command, capsys):
    """An option the command does not know exits 2 and names the command."""
    with pytest.raises(SystemExit) as exit_:
        command(lambda args: 0, "--nmber", "1")
    assert exit_.value.code == 2
    assert "normplugin fake: error: unrecognized arguments: --nmber" in capsys.readouterr().err
