"""Megatron's layer of every scheme against the reference, on one process."""

from __future__ import annotations

import pytest
import torch
from megatron_builders import DIMS, config, on_cpu, pair, split_qkv, start

from normplugin.placement import SCHEMES, resolve_scheme
from normplugin.reference import causal_mask
from normplugin.testing import gradients

S, B = 6, 2
EXACT = {"rtol": 1e-10, "atol": 1e-10}
OPTIONS = {
    "rmsnorm": ({}, {"normalization": "RMSNorm"}),
    "zero-centred": ({}, {"layernorm_zero_centered_gamma": True}),
    "eps": ({}, {"layernorm_epsilon": 0.1}),
    "after": ({"head_scale": "after-out-proj"}, {}),
    "before": ({"head_scale": "before-out-proj"}, {}),
    "lambda": ({"residual_scale": True}, {}),
    "qk head": ({"qk_norm": "head"}, {}),
    "qk full": ({"qk_norm": "full"}, {}),
    "no bias": ({}, {"add_bias_linear": False}),
    "fused add": ({}, {"bias_dropout_fusion": True}),
}
CASES = [pytest.param(s, {}, {}, id=s) for s in SCHEMES] + [
    pytest.param(s, o, c, id=f"{s} {name}")
    for s in ("normformer", "periln", "A+C")
    for name, (o, c) in OPTIONS.items()
]


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", on_cpu)
    start()


@pytest.mark.parametrize(("name", "options", "changes"), CASES)
def test_layer_equals_reference(name, options, changes):
    """Outputs and every gradient equal the paper's formula, in fp64."""
    scheme = resolve_scheme(name, **options)
    layer, reference, names = pair(scheme, config(**changes))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(S, B, DIMS.d_model, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    hidden = torch.triu(torch.ones(1, 1, S, S, dtype=torch.bool), 1)
    mine, _ = layer(x, attention_mask=hidden)
    theirs = reference(x, causal_mask(S, x))
    torch.testing.assert_close(mine, theirs, **EXACT)
    ours, expected = gradients(mine, {"x": x}, layer), gradients(theirs, {"x": x}, reference)
    qkv = {k: v for k, v in ours.items() if "linear_qkv" in k and "norm" not in k}
    compared = {names.get(k, k): v for k, v in ours.items() if k not in qkv} | split_qkv(qkv)
    for key, gradient in compared.items():
        torch.testing.assert_close(
            gradient, expected[key], **EXACT, msg=lambda m, k=key: f"{k}: {m}"
        )
