"""Real text, prepared once, and fairseq's own commands in their own processes."""

from __future__ import annotations

import os
import statistics as stdlib_module
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from normplugin.cli import main

REPO = Path(__file__).resolve().parents[2]
USER_DIR = REPO / "normplugin" / "fairseq_plugin"


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder with a few of the standard library's sources."""
    library = Path(stdlib_module.__file__).parent
    inputs = [str(library / f"{name}.py") for name in ("argparse", "ast", "statistics", "typing")]
    valid = [str(library / "textwrap.py")]
    out = tmp_path_factory.mktemp("prepared") / "out"
    sizes = ["--vocab-size", "500", "--document", "file", "--frameworks", "fairseq", "--quiet"]
    assert main(["prepare", *inputs, "--valid", *valid, "--out", str(out), *sizes]) == 0
    return out


def environment() -> dict[str, str]:
    """The environment of a command: one thread, this checkout first."""
    path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def command(tool: str, *arguments: object) -> list[str]:
    """The command line of ``fairseq-<tool>`` with our user dir."""
    words = [*map(str, arguments), "--user-dir", str(USER_DIR)]
    return [sys.executable, "-m", f"fairseq_cli.{tool}", *words]


@pytest.fixture
def fairseq(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run ``fairseq-<tool>`` from a folder that is not the checkout."""

    def run(tool: str, *arguments: object, ok: bool = True, stdin: str = ""):
        done = subprocess.run(
            command(tool, *arguments),
            cwd=tmp_path,
            env=environment(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if ok:
            assert done.returncode == 0, done.stderr[-3000:]
        return done

    return run
