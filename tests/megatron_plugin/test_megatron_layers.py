"""Megatron's layer of every scheme against the reference, on one process."""

from __future__ import annotations

import pytest
import torch
from megatron_builders import DIMS, build_layer, config, on_cpu, start

from normplugin.megatron_plugin.sites import layer_sites, parameter_names
from normplugin.placement import SCHEMES, resolve_scheme
from normplugin.reference import ReferenceLayer, causal_mask
from normplugin.testing import gradients, randomize_

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


def pair(scheme, cfg, layer_number: int = 1):
    """Our layer and the reference with the same random weights; Megatron names -> reference."""
    layer = build_layer(scheme, cfg, layer_number)
    randomize_(layer)
    scheme = layer.scheme
    reference = ReferenceLayer(scheme, DIMS, cfg.activation_func).double()
    names = {}
    for site in layer_sites(layer):
        for name in parameter_names(site, scheme, layer):
            suffix = f".{name.rpartition('.')[2]}" if site.is_norm else ""
            names[name] = f"{site}{suffix}"
    linears = {"self_attention.linear_proj": "attention.out"}
    linears |= {"mlp.linear_fc1": "ffn.fc1", "mlp.linear_fc2": "ffn.fc2"}
    for theirs, ours in linears.items():
        names |= {f"{theirs}.{p}": f"{ours}.{p}" for p in ("weight", "bias")}
    state = {names[n]: p for n, p in layer.named_parameters() if n in names}
    state |= split_qkv(dict(layer.named_parameters()))
    if not cfg.add_bias_linear:
        zeros = {n: torch.zeros_like(p) for n, p in reference.named_parameters()}
        state = {n: state.get(n, zeros[n]) for n in zeros}
    reference.load_state_dict(state, strict=True)
    return layer, reference, names


def split_qkv(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Megatron's interleaved query, key and value rows as the reference's three linears."""
    found = {}
    for name in ("weight", "bias"):
        mixed = parameters.get(f"self_attention.linear_qkv.{name}")
        if mixed is not None:
            rows = mixed.detach().unflatten(0, (DIMS.n_heads, 3, DIMS.head_dim))
            for i, key in enumerate("qkv"):
                found[f"attention.{key}.{name}"] = rows[:, i].flatten(0, 1)
    return found


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
