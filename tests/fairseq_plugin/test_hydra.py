"""``fairseq-hydra-train`` builds what ``fairseq-train`` builds: every architecture and option."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum

import pytest
import torch
from fairseq.dataclass.utils import interpret_dc_type
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq_builders import parse
from hydra_builders import built, completed, hydra_config
from kinds import SOURCE, TARGET

from normplugin.fairseq_plugin.archs import MODELS
from normplugin.fairseq_plugin.checks import _REPLACED, TASKS
from normplugin.placement import KINDS
from normplugin.presets import ARCHITECTURES

OURS = {
    "norm_scheme": "normformer",
    "norm_type": "rmsnorm",
    "norm_eps": 0.003,
    "norm_zero_centered": True,
    "head_scale": "after-out-proj",
    "residual_scale": True,
    "qk_norm": "head",
    "embedding_norm": True,
    "output_norm_init": 0.25,
    "recompute_ffn_norm": True,
}
# Refused, or decided by the scheme.
LEFT_OUT = {*_REPLACED, "_name", "encoder_normalize_before", "decoder_normalize_before"}
LEFT_OUT |= {"base_sublayers", "base_shuffle"}


@pytest.fixture
def configs(monkeypatch, tmp_path):
    """A function that gives the two configs of a model, by command line and by hydra."""

    def make(kind: str, arch: str, options: dict[str, object]):
        task = TASKS[kind][0]
        words = []
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}", *[str(value)] * (not isinstance(value, bool))]
        sections = {"task": {"_name": task, "data": "data"}, "model": {"_name": arch, **options}}
        (tmp_path / "given.yaml").write_text(f"# @package _global_\n{json.dumps(sections)}")
        return (
            parse("--task", task, "--arch", arch, *words),
            hydra_config(monkeypatch, folder=tmp_path, name="given"),
        )

    return make


# Scheme and size are independent: every size, and every scheme of every kind.
@pytest.mark.parametrize(
    "name", [n for n, a in ARCHITECTURES.items() if a.scheme == "normformer" or n.endswith("tiny")]
)
def test_every_architecture(name, configs, monkeypatch):
    """hydra's defaults, which come before the architecture, hide none of its values."""
    kind = ARCHITECTURES[name].kind
    line, hydra = (completed(monkeypatch, cfg) for cfg in configs(kind, name, {}))
    assert hydra == line


def upstreams(kind: str) -> dict[str, object]:
    """A value that is not the default, for each of upstream's options of a kind's model."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(MODEL_DATACLASS_REGISTRY[MODELS[kind][0]]):
        if field.name in LEFT_OUT | OURS.keys() or str(field.default).startswith("${"):
            continue
        of = interpret_dc_type(interpret_dc_type(field.type))
        if of is bool:
            found[field.name] = not field.default
        elif issubclass(of, Enum):
            found[field.name] = list(of)[-1].value
        else:
            found[field.name] = {int: 4, float: 0.25, str: "1,2"}[of]
    return found


@pytest.mark.parametrize("whose", ["ours", "upstreams"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_option(kind, whose, configs, monkeypatch):
    """Every option of the model, ours and upstream's, arrives by both ways."""
    options = OURS if whose == "ours" else upstreams(kind)
    assert len(options) > 9
    name = next(a.name for a in ARCHITECTURES.values() if a.kind == kind)
    line, hydra = (completed(monkeypatch, cfg) for cfg in configs(kind, name, options))
    assert hydra == line
    assert {option: line[option] for option in options} == options


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_own_name(kind, configs, monkeypatch):
    """Without an architecture the model is the kind's preln, or any scheme in its shape."""
    base = next(a.name for a in ARCHITECTURES.values() if a.kind == kind)
    _, named = configs(kind, MODELS[kind][0], {"norm_scheme": "periln"})
    line, _ = configs(kind, base, {"norm_scheme": "periln"})
    found, expected = (completed(monkeypatch, cfg) for cfg in (named, line))
    assert found == expected


@pytest.mark.parametrize("suffix", ["", "_mlm", "_mt"])
def test_the_built_models_are_equal(suffix, configs):
    """Values and logits of the two built models are equal, bit for bit."""
    name = f"normformer{suffix}_tiny"
    options = {"qk_norm": "head", "residual_scale": True, "embedding_norm": True}
    line, hydra = (built(cfg).eval() for cfg in configs(ARCHITECTURES[name].kind, name, options))
    found = dict(hydra.named_parameters())
    assert list(found) == [name for name, _ in line.named_parameters()]
    for key, value in line.named_parameters():
        assert torch.equal(found[key], value), key
    batch = (SOURCE, None, TARGET) if suffix == "_mt" else (SOURCE,)
    assert torch.equal(hydra(*batch)[0], line(*batch)[0])
