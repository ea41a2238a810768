"""Real text, prepared once, and Megatron's own trainer on it, without a GPU."""

from __future__ import annotations

import statistics as stdlib_module
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron_trainer import ENTRY, TINY, data_options, execute, torchrun

from normplugin.cli import main


@pytest.fixture(scope="session")
def megatron_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder with a few of the standard library's sources."""
    library = Path(stdlib_module.__file__).parent
    inputs = [str(library / f"{name}.py") for name in ("argparse", "ast", "statistics", "typing")]
    valid = [str(library / "textwrap.py")]
    out = tmp_path_factory.mktemp("megatron") / "out"
    sizes = ["--vocab-size", "500", "--document", "file", "--frameworks", "megatron", "--quiet"]
    assert main(["prepare", *inputs, "--valid", *valid, "--out", str(out), *sizes]) == 0
    return out


@pytest.fixture(scope="session")
def train(megatron_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Train a tiny GPT under the CPU emulation; return all it printed."""
    folder = tmp_path_factory.mktemp("runs")

    def run(processes: int, *options: object, entry: tuple = (ENTRY,), ok: bool = True) -> str:
        words = [*entry, *TINY, *data_options(megatron_data), *options]
        return execute(torchrun(processes, *words), folder, ok)

    return run
