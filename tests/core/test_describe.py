"""``normplugin describe`` says what is there, in numbers that add up."""

from __future__ import annotations

import json
import re

import pytest

from normplugin.cli import main
from normplugin.placement import SCHEMES
from normplugin.presets import ARCHITECTURES


def described(capsys, *argv: str) -> dict:
    assert main(["describe", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", [*SCHEMES, "normformer_tiny", "periln_3_2b", "outputln_mlm"])
def test_counts_add_up(name, capsys):
    """Per-site counts sum to the totals; a scheme without a size has shapes by name."""
    report = described(capsys, name)
    assert report["sites"]
    if name not in ARCHITECTURES:
        assert {s["shape"] for s in report["sites"]} <= {"(d_model,)", "(d_ffn,)"}
        return
    layer = sum(s["count"] for s in report["sites"] if not s["site"].startswith("stack"))
    stack = sum(s["count"] for s in report["sites"] if s["site"].startswith("stack"))
    totals = report["norm_parameters"]
    (side,) = report["sizes"]
    assert (totals[side]["per_layer"], totals[side]["stack"]) == (layer, stack)
    assert totals["total"] == report["sizes"][side]["n_layers"] * layer + stack


def test_normformer_125m_adds_what_the_paper_counts(capsys):
    """The paper rounds NormFormer's extra parameters at 125M to 100,000: they are 92,304."""
    extra = [
        described(capsys, name)["norm_parameters"]["total"]
        for name in ("normformer_125m", "preln_125m")
    ]
    assert extra[0] - extra[1] == 92_304


def test_options_go_on_top(capsys):
    """Options change what is described, and illegal ones are refused in one line."""
    report = described(capsys, "periln_tiny", "--norm-type", "rmsnorm", "--qk-norm", "head")
    sites = {s["site"]: s for s in report["sites"]}
    assert sites["attention.query"]["count"] == 32
    assert sites["attention.output"]["parameters"] == ["weight"]
    assert main(["describe", "preln", "--output-norm-init", "0.1"]) == 2
    assert "has no output norm" in capsys.readouterr().err


def test_no_name_lists_all_names(capsys):
    """Without a name it lists the schemes and the sizes."""
    assert main(["describe"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {re.escape(name)} ", text, re.MULTILINE) for name in SCHEMES)
    assert re.search(r"_2_7b +32 +2560 +10240 +32", text)


def test_unknown_name(capsys):
    """A misspelt name is one line with the nearest legal one; a missing file says so."""
    assert main(["describe", "normfomer_355m"]) == 2
    assert "Did you mean 'normformer_355m'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["normformer_2_7b", "periln_mlm_large", "normformer_mt"])
def test_a_built_model_holds_what_is_described(name, capsys):
    """--build counts the parameters of fairseq's model: they are those described."""
    report = described(capsys, name, "--build", "--qk-norm", "head", "--residual-scale")
    assert report["built"]["norm_and_scale_parameters"] == report["norm_parameters"]["total"]
    assert report["norm_parameters"]["total"] > 0


def test_a_scheme_without_a_size_is_not_built(capsys):
    """--build asks for an architecture."""
    assert main(["describe", "A+C", "--build"]) == 2
    assert "without a size" in capsys.readouterr().err
