"""The benchmarks' counts, and that the command runs. No time is asserted."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from normplugin.placement import Dims

ROOT = Path(__file__).resolve().parents[2]
DIMS = Dims(n_layers=1, d_model=256, d_ffn=1024, n_heads=4)
# In units of d_model per layer and token, the statistics of the two added norms on top.
EXTRA = {
    "stock preln": 0.0,
    "stock normformer": 6.0,
    "preln": 0.0,
    "periln": 2.0,
    "periln rmsnorm": 2.0,
    "normformer": 1.0,
    "normformer recompute": -3.0,
    "outputln": 2.0,
    "postln": 0.0,
}


@pytest.fixture
def benchmarks(monkeypatch):
    """The benchmark package, which lies beside the tests and is not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import fairseq_builders, fairseq_cases, targets

    variants = {v.name: v for v in fairseq_builders.VARIANTS}
    assert variants.keys() == EXTRA.keys()
    return variants, fairseq_cases, targets


@pytest.mark.parametrize("name", EXTRA)
def test_saved_activations(benchmarks, name):
    """A layer keeps what the design says beyond Pre-LN's, and at most 4 floats of statistics."""
    variants, cases, targets = benchmarks
    stock, _ = cases.saved_per_token(variants["stock preln"], DIMS)
    saved, _ = cases.saved_per_token(variants[name], DIMS)
    extra = saved - stock
    assert EXTRA[name] <= extra <= EXTRA[name] + targets.statistics_allowance(DIMS.d_model)
    assert targets.statistics_allowance(DIMS.d_model) * DIMS.d_model == 4
    limits = {t.variant: t.limit for t in targets.SAVED_EXTRA}
    assert limits.get(name, EXTRA[name]) == EXTRA[name]


def test_head_scale_keeps_one_weight_per_layer(benchmarks):
    """Folding the head scale keeps W diag(g), d rows of d, once per layer and not per token."""
    variants, cases, _ = benchmarks
    _, stock = cases.saved_per_token(variants["stock preln"], DIMS)
    _, ours = cases.saved_per_token(variants["normformer"], DIMS)
    assert ours - stock == pytest.approx(DIMS.d_model + 1, abs=1e-6)  # and g, d numbers


def test_quick_run_writes_records(benchmarks, tmp_path):
    """The command runs end to end; its file holds every column, variant, mode and metric."""
    target = tmp_path / "out" / "records.csv"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "fairseq", "--quick", "--csv", str(target)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "stock normformer" in done.stdout
    with target.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    head = "case scheme framework mode metric unit shape dtype p20 p50 p80 bytes_moved device torch"
    assert list(rows[0]) == [*head.split(), "framework_version", "commit", "command", "utc"]
    assert {r["scheme"] for r in rows} == EXTRA.keys()
    assert {r["mode"] for r in rows} == {"forward", "backward", "step"}
    metrics = {"time", "ratio", "cpu_time", "cpu_ratio", "saved", "saved_extra", "parameters"}
    assert {r["metric"] for r in rows} == metrics
    assert {float(r["p50"]) for r in rows if r["metric"] == "ratio" and _stock(r)} == {1.0}


def _stock(row: dict[str, str]) -> bool:
    return row["scheme"] == "stock preln" and row["unit"] == "/ stock preln"
