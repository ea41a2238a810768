"""Importing the vocabulary loads no framework and patches nothing; and the check can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import normplugin

ROOT = Path(normplugin.__file__).resolve().parent.parent
HEAVY = ("torch", "fairseq", "megatron", "transformer_engine", "apex", "numpy", "sentencepiece")
LIGHT = ("", ".placement", ".presets", ".cli", ".errors", ".user_dir")

WATCH_MODULES = """
import json, sys
before = set(sys.modules)
{snippet}
print(json.dumps(sorted(set(sys.modules) - before)))
"""

WATCH_TORCH = """
import json, torch
def state():
    return {{name: id(getattr(torch, name)) for name in ("load", "save", "set_default_dtype")}} | {{
        "dtype": str(torch.get_default_dtype()),
        "LayerNorm.forward": id(torch.nn.LayerNorm.forward),
        "layer_norm": id(torch.nn.functional.layer_norm),
        "Module.__call__": id(torch.nn.Module.__call__),
    }}
before = state()
{snippet}
after = state()
print(json.dumps(sorted(key for key in before if before[key] != after[key])))
"""


def report(template, snippet):
    """Run the template around the snippet in a fresh Python; return the list it prints."""
    done = subprocess.run(
        [sys.executable, "-c", template.format(snippet=snippet)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def loaded(snippet):
    """The heavy packages that the snippet imports."""
    packages = {name.partition(".")[0] for name in report(WATCH_MODULES, snippet)}
    return sorted(packages & set(HEAVY))


def importing(modules):
    """The snippet that imports these modules of the package."""
    return "\n".join(f"import normplugin{module}" for module in modules)


@pytest.mark.parametrize("module", LIGHT)
def test_the_vocabulary_imports_no_framework(module):
    """Each light module, alone and first, leaves torch, the frameworks and numpy unloaded."""
    assert loaded(importing([module])) == []


def test_using_the_vocabulary_imports_no_framework():
    """Resolving a scheme, hashing it and printing help need no framework either."""
    assert (
        loaded(
            "import io, contextlib, normplugin.cli, normplugin.placement as p\n"
            "p.architecture_hash(p.resolve_scheme('periln'), p.Dims(1, 4, 8, 2), 'causal_lm')\n"
            "with contextlib.redirect_stdout(io.StringIO()): normplugin.cli.main([])"
        )
        == []
    )


def test_the_reference_patches_nothing_in_torch():
    """Vocabulary and reference leave torch.load, the norms and the default dtype as they were."""
    assert report(WATCH_TORCH, importing((*LIGHT, ".reference", ".reference_model"))) == []


def test_the_reference_imports_torch_and_none_of_our_fast_code():
    """The oracle stays independent: no framework, and of our modules only placement and errors."""
    names = report(WATCH_MODULES, importing([".reference", ".reference_model"]))
    ours = ["", ".errors", ".placement", ".reference", ".reference_model"]
    assert [n for n in names if n.startswith("normplugin")] == [f"normplugin{m}" for m in ours]
    assert {"fairseq", "megatron"}.isdisjoint(names)


def test_the_import_check_can_fail():
    """The same check reports torch when a snippet does import it."""
    assert "torch" in loaded(f"{importing(LIGHT)}\nimport torch.nn")


def test_the_patch_check_can_fail():
    """The same check reports a replaced torch.load and a changed default dtype."""
    snippet = "torch.load = lambda *a: None\ntorch.set_default_dtype(torch.float64)"
    assert report(WATCH_TORCH, snippet) == ["dtype", "load"]
