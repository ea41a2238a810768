"""Print the absolute path to give to fairseq's --user-dir."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command takes no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the path; the folder need not be importable for that."""
    print(Path(__file__).resolve().parent / "fairseq_plugin")
    return 0
