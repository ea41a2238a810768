"""The ``normplugin`` command: one subcommand, one module.

A command module has ``add_arguments(parser)`` and ``run(args) -> int``; it is imported only when
its command is asked for, so that ``normplugin --help`` needs no framework.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence

from normplugin import __version__
from normplugin.errors import NormPluginError, unknown_value

# Command -> (module, one line of help).
COMMANDS: Mapping[str, tuple[str, str]] = {
    "prepare": ("normplugin.data.command", "turn text into fairseq's and Megatron's training data"),
    "compare": (
        "normplugin.compare.command",
        "train schemes against the upstream baseline",
    ),
    "diagnose": (
        "normplugin.diagnostics.command",
        "measure a checkpoint: gradients, stream, sublayers, gains over depth",
    ),
    "describe": (
        "normplugin.describe",
        "show the norms of a scheme, architecture or checkpoint",
    ),
    "doctor": ("normplugin.doctor", "say what is installed, what works and what to do"),
    "user-dir": ("normplugin.user_dir", "print the path for fairseq's --user-dir"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code (0 good, 1 the command says no, 2 bad input)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "--version"):
        _overview().parse_args(argv)
        _overview().print_help()
        return 2
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        return _fail(unknown_value("command", name, COMMANDS))
    try:
        module = importlib.import_module(COMMANDS[name][0])
        parser = argparse.ArgumentParser(
            prog=f"normplugin {name}",
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(parser)
        return int(module.run(parser.parse_args(rest)))
    except NormPluginError as error:
        return _fail(str(error), name)
    except KeyboardInterrupt:
        return _fail("interrupted.", name, code=130)


def _overview() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="normplugin",
        usage="normplugin COMMAND [options]",
        description="NormFormer and Peri-LN for fairseq and Megatron-Core.",
        epilog=f"commands:\n{lines}\n\n'normplugin COMMAND --help' explains one command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"normplugin {__version__}")
    return parser


def _fail(message: str, command: str = "", code: int = 2) -> int:
    print(f"normplugin {command}".strip() + f": error: {message}", file=sys.stderr)
    return code
