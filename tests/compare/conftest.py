"""Text prepared once, and one real comparison of two arms, for all tests here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compare_setup import ARGUMENTS, ROOT

from normplugin.cli import main


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a prepared folder of 1,500 short lines."""
    folder = tmp_path_factory.mktemp("compare")
    lines = [f"line {i} says that {i * 7 % 50} and {i % 13} are numbers" for i in range(1500)]
    (folder / "text").write_text("\n".join(lines) + "\n", encoding="utf-8")
    arguments = [str(folder / "text"), "--out", str(folder / "data"), "--vocab-size", "300"]
    assert main(["prepare", *arguments, "--frameworks", "fairseq", "--quiet"]) == 0
    return folder / "data"


@pytest.fixture(scope="session")
def compare():
    """Return a function that runs ``python -m normplugin compare`` from a foreign folder."""

    def start(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "normplugin", "compare", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "LOGLEVEL": "ERROR"},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return start


@pytest.fixture(scope="session")
def finished(data: Path, compare, tmp_path_factory: pytest.TempPathFactory):
    """Return the folder of a real comparison and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    done = compare("--out", "out", "--data", data, *ARGUMENTS, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "out", done
