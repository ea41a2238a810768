"""fairseq's encoder layer of every scheme against the reference."""

from __future__ import annotations

import pytest
import torch
from fairseq_builders import DIMS, build_encoder_layer
from test_layers import CASES, EXACT, FP32_SOFTMAX, B, T, assert_same, stream

from normplugin.fairseq_plugin.sites import reference_names
from normplugin.placement import resolve_scheme
from normplugin.reference import ReferenceLayer, causal_mask
from normplugin.testing import randomize_


def pair(scheme, **kwargs):
    """Our encoder layer and the reference with the same random weights."""
    layer = build_encoder_layer(scheme, **kwargs)
    randomize_(layer)
    reference = ReferenceLayer(scheme, DIMS, torch.tanh).double()
    names = reference_names(scheme)
    state = {names[name]: value for name, value in layer.named_parameters()}
    reference.load_state_dict(state, strict=True)
    return layer, reference, names


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_encoder_layer_equals_reference(name, options, padded):
    """Outputs and every gradient equal the paper's formula, with and without left padding."""
    scheme = resolve_scheme(name, **options)
    layer, reference, names = pair(scheme, recompute=scheme.ffn_hidden and padded)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[0, :2] = padding[1, -1] = padded
    x = stream()
    mine = layer(x, encoder_padding_mask=padding if padded else None)
    assert_same(mine, reference(x, None, padding), x, names, layer, reference)
    layer.eval()
    again = layer(x, encoder_padding_mask=padding if padded else None)
    torch.testing.assert_close(again, mine, **EXACT)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_encoder_layer_with_an_attention_mask(name, options):
    """A mask of what each position may see (upstream adds -1e4 in fp64) reaches the attention."""
    scheme = resolve_scheme(name, **options)
    layer, reference, names = pair(scheme)
    x = stream()
    future = torch.ones(T, T).triu(1)
    mine = layer(x, encoder_padding_mask=None, attn_mask=future)
    assert_same(mine, reference(x, causal_mask(T, x)), x, names, layer, reference, FP32_SOFTMAX)


@pytest.mark.parametrize("name", ["postln", "A+C", "B+C", "normformer"])
def test_the_fused_layer_of_official_fairseq_is_never_taken(name):
    """0.12.2 would take it for a loaded layer that never trained, if ``can_use_fastpath``."""
    scheme = resolve_scheme(name, residual_scale=True)
    layer, reference, _ = pair(scheme, activation_fn="relu")
    reference.ffn.activation = torch.relu
    layer.load_state_dict(layer.state_dict())
    assert layer.can_use_fastpath is False
    x = stream().detach()
    found = layer.eval()(x, encoder_padding_mask=None)
    torch.testing.assert_close(found, reference(x), **EXACT)
