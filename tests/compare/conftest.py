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
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of 1,500 short lines."""
    path = tmp_path_factory.mktemp("text") / "text"
    lines = [f"line {i} says that {i * 7 % 50} and {i % 13} are numbers" for i in range(1500)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def prepared(text: Path, tmp_path_factory: pytest.TempPathFactory):
    """Return a function that prepares the text for a framework, or as pairs."""

    def prepare(name: str, *arguments: str) -> Path:
        folder = tmp_path_factory.mktemp("prepared") / name
        fixed = ["--out", str(folder), "--vocab-size", "300", "--quiet"]
        assert main(["prepare", *arguments, *fixed]) == 0
        return folder

    return prepare


@pytest.fixture(scope="session")
def data(text: Path, prepared) -> Path:
    """Return the text, prepared for fairseq."""
    return prepared("fairseq", str(text), "--frameworks", "fairseq")


@pytest.fixture(scope="session")
def started():
    """Return a function that starts ``python -m normplugin compare`` in a foreign folder."""

    def start(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "normplugin", "compare", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "LOGLEVEL": "ERROR"},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start


@pytest.fixture(scope="session")
def finished(data: Path, started, tmp_path_factory: pytest.TempPathFactory):
    """Return the folder of a real comparison and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    process = started("--out", "out", "--data", data, *ARGUMENTS, cwd=folder)
    printed, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return folder / "out", printed, said
