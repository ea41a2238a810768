"""Every command in a document runs, as it stands there, in a folder that is not the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from labelled_corpus import write_labelled
from parallel_corpus import short_lines, write_parallel

REPO = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    REPO / "README.md",
    REPO / "CONTRIBUTING.md",
    *sorted(REPO.glob("examples/*/README.md")),
    *sorted(REPO.glob("docs/*.md")),
]
BLOCK = re.compile(r"(<!-- test: run -->\n)?```bash\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One folder for all blocks: later ones use the data of the first."""
    return tmp_path_factory.mktemp("reader")


def run(block: str, cwd: Path) -> str:
    tools = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPO),
        "PYTHON": sys.executable,
        "EXAMPLES": str(REPO / "examples"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def marked(document: Path) -> list[str]:
    return [block for mark, block in BLOCK.findall(document.read_text(encoding="utf-8")) if mark]


def test_the_readmes_commands_run(folder):
    """Prepare, train and evaluate run; the dead flags of upstream change no parameter count."""
    start, kinds, megatron, compare, diagnose, proof = marked(REPO / "README.md")
    run(start, folder)
    write_labelled(folder)
    write_parallel(folder, short_lines(200))
    assert "BLEU" in run(kinds, folder)
    assert "emulat" in run(megatron, folder).lower()
    assert (folder / "checkpoints" / "checkpoint_last.pt").exists()
    assert "fp16 bits" in run(diagnose, folder)
    small = folder / "small"
    small.mkdir()
    run("normplugin prepare ../copy.src --out data --vocab-size 500 --frameworks fairseq", small)
    run(compare, small)
    assert (small / "comparison" / "report.html").exists()
    counts = re.findall(r"num. shared model params: ([\d,]+)", run(proof, folder))
    assert len(counts) == 2 and counts[0] == counts[1]
    for card in sorted(REPO.glob("examples/*/README.md")):
        blocks = marked(card)
        assert blocks
        for block in blocks:
            run(block, folder)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(REPO)))
def test_other_commands_exist(document):
    """Blocks that are not run (they would install or take minutes) name real targets and files."""
    targets = set(re.findall(r"^([a-z]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE):
        assert target in targets, target
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (document.parent / link).exists(), link


def test_every_block_is_run_or_known():
    """A new bash block is marked to run, or holds only make, pip and pre-commit commands."""
    for document in DOCUMENTS:
        for mark, block in BLOCK.findall(document.read_text(encoding="utf-8")):
            lines = [line for line in block.splitlines() if line.strip()]
            known = all(re.match(r"(make|pip install|python -m benchmarks)\b", x) for x in lines)
            assert mark or known, f"{document.name}:\n{block}"
