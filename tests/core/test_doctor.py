"""The doctor judges by trying, never by version strings, and always says what to do."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from normplugin import doctor
from normplugin.doctor_probes import BROKEN, MISSING, OK, Finding

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 240.0

RAISING_CONSTRUCTOR = """
class FusedLayerNorm:
    def __init__(self, *sizes):
        raise ModuleNotFoundError("No module named 'fused_layer_norm_cuda'")
"""
CUDA_ONLY_FORWARD = """
import torch
class FusedLayerNorm(torch.nn.LayerNorm):
    def forward(self, x):
        raise RuntimeError("input must be a CUDA tensor")
"""
WORKING = """
import torch
class FusedLayerNorm(torch.nn.LayerNorm):
    pass
"""


def stub(folder: Path, name: str, **files: str) -> None:
    """Write a package of that name; `init` is its __init__."""
    package = folder / name
    package.mkdir()
    for stem, text in {"init": "", **files}.items():
        filename = "__init__.py" if stem == "init" else f"{stem}.py"
        (package / filename).write_text(text, encoding="utf-8")


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    """Index findings by their name."""
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        ({"normalization": RAISING_CONSTRUCTOR}, BROKEN, "fused_layer_norm_cuda"),
        ({"normalization": CUDA_ONLY_FORWARD}, BROKEN, "must be a CUDA tensor"),
        ({"normalization": WORKING}, OK, "a FusedLayerNorm ran on"),
        ({}, BROKEN, "an unrelated package"),
    ],
)
def test_apex_counts_only_when_a_norm_runs(tmp_path, monkeypatch, files, status, words):
    """Importable is not usable: one norm is constructed and run, and a failure carries advice."""
    pytest.importorskip("torch")
    stub(tmp_path, "apex", **files)
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = doctor.run_probe("apex", TIMEOUT)
    assert finding.status == status
    assert words in finding.fact
    assert ("uninstall" in finding.action) == (status == BROKEN)


@pytest.mark.parametrize(
    ("versions", "flagged"),
    [
        ({"megatron-core": "0.15.0", "numpy": "2.1"}, "megatron-core 0.15.0 with numpy 2.1"),
        ({"megatron-core": "0.15.0rc2", "numpy": "1.26.4"}, ""),
        ({"megatron-core": "0.19.2", "numpy": "2.5.5"}, ""),
        ({"fairseq": "0.10.2", "numpy": "1.24.0"}, "fairseq 0.10.2 with numpy 1.24.0"),
        ({"fairseq": "0.10.2", "numpy": "1.23.5"}, ""),
        ({"numpy": "2.5.5"}, ""),
        ({}, ""),
    ],
)
def test_known_bad_version_pairs_are_flagged(monkeypatch, versions, flagged):
    """A pair that is known to clash is BROKEN with both versions; any other pair is not."""

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    (finding,) = doctor.clash_findings()
    assert finding.status == (BROKEN if flagged else OK)
    assert flagged in finding.fact
    assert ("pip install" in finding.action) == bool(flagged)


@pytest.fixture(scope="module")
def fairseq_findings() -> dict[str, Finding]:
    """What the doctor finds about the installed fairseq."""
    if importlib.util.find_spec("fairseq") is None:
        pytest.skip("fairseq is not installed")
    return by_name(doctor.run_probe("fairseq", TIMEOUT))


def test_fairseq_is_described_by_its_behaviour(fairseq_findings):
    """Version, import path, duplicate models, safe loading and the scale flags are all listed."""
    assert fairseq_findings["fairseq"].status == OK
    assert "imported from" in fairseq_findings["fairseq"].fact
    assert "registering a model name twice" in fairseq_findings["fairseq duplicates"].fact
    assert "--norm-scheme" in fairseq_findings["fairseq scale flags"].fact
    assert "an mmap dataset" in fairseq_findings["fairseq data"].fact
    assert "files of fairseq-train load" in fairseq_findings["fairseq checkpoints"].fact
    assert fairseq_findings["fairseq generation"].status == OK


def test_a_nonsense_fairseq_version_changes_nothing(fairseq_findings):
    """No probe reads fairseq.__version__."""
    code = (
        "import json, sys, fairseq; sys.path.insert(0, sys.argv[1]); fairseq.__version__ = '?!';"
        "from normplugin import doctor_probes as p;"
        "p.main('normplugin.doctor_frameworks:probe_fairseq')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.rpartition("normplugin-doctor: ")[2])
    assert by_name([Finding(**row) for row in rows]) == fairseq_findings


def test_trusting_torch_load_is_noticed(monkeypatch, fairseq_findings):
    """The checkpoint finding follows what loading does, with and without torch's trust."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    findings = by_name(doctor.run_probe("fairseq", TIMEOUT))
    assert "loads files that hold config objects" in findings["fairseq checkpoints"].fact


def test_a_fairseq_that_cannot_be_imported_names_python_and_the_range(tmp_path, monkeypatch):
    """An official fairseq on Python 3.11+ dies in a dataclass; the line says what it takes."""
    error = "mutable default <class 'CommonConfig'> for field common is not allowed"
    stub(tmp_path, "fairseq", init=f"raise ValueError({error!r})")
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = doctor.run_probe("fairseq", TIMEOUT)
    assert finding.status == BROKEN
    assert f"on Python {platform.python_version()}: ValueError: mutable default" in finding.fact
    assert "0.12.2 runs on Python up to 3.10" in finding.action


def test_a_megatron_that_cannot_be_imported_is_one_sentence(tmp_path, monkeypatch):
    """Megatron-Core 0.15.0 raises without CUDA; the line names the module and a good version."""
    stub(tmp_path, "megatron")
    stub(tmp_path / "megatron", "core", init="raise RuntimeError('no CUDA\\nTraceback')")
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = doctor.run_probe("megatron.core", TIMEOUT)
    assert (finding.status, finding.fact) == (BROKEN, "RuntimeError: no CUDA")
    assert "0.15.0 cannot be imported without CUDA" in finding.action


@pytest.mark.parametrize(
    ("source", "timeout", "words"),
    [
        ("import os; os.abort()", TIMEOUT, "crashed on import or first use (SIGABRT)"),
        ("raise SystemExit(7)", TIMEOUT, "ended with exit code 7"),
        ("import time; time.sleep(600)", 2.0, "no answer within 2 s"),
    ],
)
def test_a_probe_that_dies_or_hangs_is_a_finding(tmp_path, monkeypatch, source, timeout, words):
    """A crash of a package is a line of the report, not the end of the doctor."""
    stub(tmp_path, "sentencepiece", init=source)
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = doctor.run_probe("sentencepiece", timeout)
    assert finding.status == BROKEN
    assert words in finding.fact
    assert finding.action


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ({"fairseq": OK, "megatron.core": MISSING}, 0),
        ({"fairseq": MISSING, "megatron.core": OK}, 0),
        ({"fairseq": MISSING, "megatron.core": MISSING}, 1),
        ({"fairseq": OK, "apex": BROKEN}, 1),
    ],
)
def test_exit_code_needs_one_framework_and_nothing_broken(monkeypatch, capsys, statuses, code):
    """0 exactly when a framework is usable and nothing is broken; --json says the same."""
    findings = [Finding(name, status, "fact", "do") for name, status in statuses.items()]
    monkeypatch.setattr(doctor, "examine", lambda timeout: findings)
    assert doctor.run(argparse.Namespace(json=False, timeout=1.0)) == code
    assert len(capsys.readouterr().out.splitlines()) == len(findings) + 1
    assert doctor.run(argparse.Namespace(json=True, timeout=1.0)) == code
    assert json.loads(capsys.readouterr().out)["ok"] == (code == 0)


def test_without_any_package_the_doctor_still_answers(tmp_path):
    """With an empty site-packages: exit 1, and one line names Python and fairseq."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "normplugin", "doctor"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("MISSING  fairseq")]
    assert len(lines) == 1
    assert f"Python {platform.python_version()}" in lines[0]
    assert "fairseq 0.12.2" in lines[0]
    assert "Traceback" not in done.stdout + done.stderr


def test_every_probe_names_an_existing_function():
    """The table of probes points at functions that exist."""
    for target in doctor.PROBES.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
