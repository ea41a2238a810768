"""examples/claims: its script runs as it is, small, and its note says what was found."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from compare_setup import ROOT

CLAIMS = ROOT / "examples" / "claims"
SMALL = {"VOCAB": "300", "SIZE": "2x16x2", "UPDATES": "4", "SEEDS": "1", "RATES": "1e-2"}
SMALL |= {f"MLM_{name}": SMALL[name] for name in ("SIZE", "UPDATES", "RATES")}
SMALL |= {"WIDE": "1e-2", "MLM_WIDE": "1e-2", "LONG": "6", "LONG_SEEDS": "1"}
ARMS = {"ARMS": "postln,normformer", "RAMP_ARMS": "postln", "MLM_ARMS": "postln"}


@pytest.fixture(scope="module")
def note():
    """Return note.py as a module."""
    spec = importlib.util.spec_from_file_location("note", CLAIMS / "note.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_ends_in_a_note_with_pictures(text, tmp_path):
    """Six comparisons; every claim is told as held, not held or not measured; pictures exist."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, module in (("normplugin", "-m normplugin"), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (commands / name).chmod(0o755)
    paths = {"PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [CLAIMS / "run.sh", "claims"],
        env={**os.environ, **paths, **SMALL, **ARMS, "TEXT": str(text), "LOGLEVEL": "ERROR"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    written = tmp_path / "claims" / "note"
    said = (written / "README.md").read_text()
    for kind in ("lm", "mlm"):
        assert f"({kind}-loss-updates.svg)" in said
    assert said.count("after training, smallest first: not measured for periln.") == 2
    assert said.count("mean over the records, smallest first: postln ") == 1
    assert said.count("not measured for normformer, normformer+residual-scale") == 1
    assert said.count("every learning rate: best of 0.01: upstream 0.01, postln 0.01") == 2
    assert "longer: final validation loss: upstream " in said
    assert said.count("models: final validation loss: upstream ") == 2
    pictures = sorted(path.name for path in written.glob("*.svg"))
    assert pictures and all(f"({name})" in said for name in pictures)
    assert ">postln</text>" in (written / "lm-loss-updates.svg").read_text()


def test_a_claim_holds_in_its_order_only(note):
    """Equal values hold too: nothing was claimed about by how much."""
    values = {"a": 1.0, "b": 2.0, "c": 2.0}
    assert note._order("x", "abc", values).endswith("order **holds**.")
    assert note._order("x", "ba", values).endswith("**does not hold**.")
    assert note._order("x", "cba", values, descending=True).endswith("order **holds**.")
    assert "not measured for d" in note._order("x", "abd", values)
