"""With the same weights, fairseq's layer and Megatron's layer are one function."""

from __future__ import annotations

import pytest
import torch
from fairseq_builders import build_layer as fairseq_layer
from megatron_builders import DIMS, config, on_cpu, pair, start

from normplugin.fairseq_plugin.sites import reference_names
from normplugin.placement import SCHEMES, resolve_scheme
from normplugin.reference import causal_mask

S, B = 6, 2


@pytest.mark.parametrize("options", [{}, {"qk_norm": "head", "residual_scale": True}], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_layers_agree(name, options, monkeypatch):
    """Same weights, same input: same output and same gradient of the input, in fp64."""
    monkeypatch.setattr(torch.cuda, "current_device", on_cpu)
    start()
    scheme = resolve_scheme(name, **options)
    # A middle layer: the last one leaves its C to the stack's final norm.
    megatron, reference, _ = pair(scheme, config(), layer_number=2)
    fairseq = fairseq_layer(scheme, dims=DIMS)
    weights = reference.state_dict()
    names = reference_names(scheme)
    fairseq.load_state_dict({n: weights[names[n]] for n, _ in fairseq.named_parameters()})
    x = torch.randn(S, B, DIMS.d_model, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    hidden = torch.triu(torch.ones(1, 1, S, S, dtype=torch.bool), 1)
    theirs, _ = megatron(inputs[0], attention_mask=hidden)
    ours, _, _ = fairseq(inputs[1], self_attn_mask=causal_mask(S, x))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    for out in (theirs, ours):
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-9, atol=1e-9)
