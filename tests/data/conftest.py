"""The odd text, prepared once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from data_text import ODD_LINES, plain_lines

from normplugin.cli import main


@pytest.fixture(scope="session")
def txt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of 410 lines, the odd ones among them, in both splits."""
    lines = plain_lines(400)
    lines[100:100] = ODD_LINES
    path = tmp_path_factory.mktemp("text") / "txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return path


@pytest.fixture(scope="session")
def prepared(txt: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the prepared folder of `txt`, lossless settings."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    arguments = [str(txt), "--out", str(out), "--vocab-size", "400", "--quiet"]
    arguments += ["--normalization", "identity", "--keep-extra-spaces"]
    assert main(["prepare", *arguments]) == 0
    return out


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs prepare, expects a refusal and an untouched folder."""

    def run(*arguments: object, out: Path | None = None) -> str:
        out = out or tmp_path / "out"
        before = sorted(out.parent.rglob("*"))
        assert main(["prepare", *map(str, arguments), "--out", str(out)]) == 2
        assert sorted(out.parent.rglob("*")) == before
        return capsys.readouterr().err

    return run
