"""Run any Megatron script with our options beside Megatron's own.

    torchrun ... -m normplugin.megatron_plugin.launch pretrain_gpt.py --norm-scheme normformer ...

The script is not changed and need not know our options: they are taken off its command line, and
it is given ``--spec`` instead. ``--cpu-emulation`` makes it run without a GPU. ``--help`` shows
our options.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from normplugin.diagnostics.options import DiagnosticsError, check_interval
from normplugin.errors import NormPluginError, SchemeError
from normplugin.megatron_plugin.arguments import (
    DIAGNOSTICS,
    add_norm_arguments,
    flag_of,
    megatron_flags,
    split_options,
)

PROGRAM = "normplugin.megatron_plugin.launch"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script; return its exit code, or 2 for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        show_help(f"torchrun ... -m {PROGRAM} SCRIPT [options] [the script's options]", __doc__)
        return 0 if words else 2
    return reported(PROGRAM, lambda: _launch(words))


def reported(program: str, run: Callable[[], None]) -> int:
    """Run; return 0, or print the error of a user in one line and return 2."""
    try:
        run()
    except NormPluginError as error:
        # All ranks find the same error; Megatron's own ranks may differ in layers, so all say it.
        rank = os.environ.get("RANK", "0")
        prefix = "" if rank == "0" else f"[rank {rank}] "
        message = re.sub(r"( when instantiating \w+)+$", "", str(error))  # build_module adds that
        print(f"{prefix}{program}: error: {message}", file=sys.stderr, flush=True)
        return 2
    return 0


def start(ours: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Check the scheme, begin the emulation; return what Megatron's parser must also be given."""
    flags = megatron_flags(ours, rest)
    _check_diagnostics(ours)
    if ours.cpu_emulation:
        from normplugin.megatron_plugin import cpu_emulation

        flags += cpu_emulation.default_flags(rest)
        cpu_emulation.enable()
    return flags


def watch(ours: argparse.Namespace) -> None:
    """Measure Megatron's training where that is asked for; imports Megatron's trainer."""
    if ours.diagnostics_interval is not None:
        from normplugin.diagnostics import megatron_train

        path = Path(ours.diagnostics_file).absolute()
        megatron_train.install(check_interval(ours.diagnostics_interval), path)


def _check_diagnostics(ours: argparse.Namespace) -> None:
    interval, file = (flag_of(name) for name in DIAGNOSTICS)
    if (ours.diagnostics_interval is None) != (ours.diagnostics_file is None):
        given, missing = (file, interval) if ours.diagnostics_file else (interval, file)
        raise DiagnosticsError(f"{given}: got it without {missing}. Give both, or none.")
    if ours.diagnostics_interval is not None:
        check_interval(ours.diagnostics_interval)


def _launch(words: Sequence[str]) -> None:
    ours, rest = split_options(words)
    if not rest or not Path(rest[0]).is_file():
        got = repr(rest[0]) if rest else "none"
        raise SchemeError(f"SCRIPT: got {got}; legal is a Python file. Name it first.")
    script, arguments = rest[0], rest[1:]
    # As `python SCRIPT` does, and before Megatron is imported: a checkout's own Megatron wins.
    sys.path.insert(0, str(Path(script).resolve().parent))
    sys.argv = [script, *arguments, *start(ours, arguments)]
    if ours.norm_scheme is not None:
        from normplugin.megatron_plugin import chosen

        chosen.choose(vars(ours))
    else:
        _check_stock(arguments)
    watch(ours)
    runpy.run_path(script, run_name="__main__")


def _check_stock(arguments: Sequence[str]) -> None:
    """Refuse a checkpoint of a scheme for Megatron's own model, which would drop its norms."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--load", "--ckpt-step", "--pretrained-checkpoint"):
        parser.add_argument(flag, default=None)
    parser.add_argument("--spec", nargs="*", default=None)
    parser.add_argument("--use-checkpoint-args", action="store_true")
    known, _ = parser.parse_known_args(list(arguments))
    if known.spec is None and not known.use_checkpoint_args:
        from normplugin.megatron_plugin.resume import check_resume

        check_resume(known, None)


def show_help(usage: str, text: str | None) -> None:
    """Print our options; Megatron's hundreds are its own (0.19.2 fails on ``--help``)."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(usage=usage, description=text, formatter_class=raw)
    add_norm_arguments(parser).print_help()


if __name__ == "__main__":
    sys.exit(main())
