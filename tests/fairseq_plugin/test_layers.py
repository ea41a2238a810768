"""fairseq's decoder layer of every scheme against the reference and against upstream."""

from __future__ import annotations

import types

import pytest
import torch
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq_builders import DIMS, build_layer, layer_config

from normplugin.fairseq_plugin.scheme_options import ACTIVATIONS
from normplugin.fairseq_plugin.sites import reference_names
from normplugin.placement import SCHEMES, resolve_scheme
from normplugin.reference import ReferenceLayer, causal_mask
from normplugin.testing import gradients, randomize_

T, B = 7, 3
EXACT = {"rtol": 1e-10, "atol": 1e-10}
# Upstream's unfused attention takes the softmax in fp32 whatever the input: a few fp32 roundings
# (6e-8), amplified by norms of small vectors by up to 300.
FP32_SOFTMAX = {"rtol": 2e-5, "atol": 2e-5}
OPTIONS = {
    "rmsnorm": {"norm_type": "rmsnorm"},
    "zero-centred": {"norm_zero_centered": True},
    "rmsnorm zero-centred": {"norm_type": "rmsnorm", "norm_zero_centered": True},
    "eps": {"norm_eps": 0.1},
    "after": {"head_scale": "after-out-proj"},
    "before": {"head_scale": "before-out-proj"},
    "lambda": {"residual_scale": True},
    "qk head": {"qk_norm": "head"},
    "qk full": {"qk_norm": "full"},
    "all": {
        "norm_type": "rmsnorm",
        "qk_norm": "head",
        "residual_scale": True,
        "head_scale": "before-out-proj",
    },
}
CASES = [pytest.param(s, {}, id=s) for s in SCHEMES] + [
    pytest.param(s, o, id=f"{s} {name}")
    for s in ("normformer", "periln", "A+C")
    for name, o in OPTIONS.items()
]


def stream(seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, B, DIMS.d_model, generator=generator, dtype=torch.float64)
    return x.requires_grad_()


def pair(scheme, cross: bool = False, **kwargs):
    """Our layer and the reference with the same random weights."""
    layer = build_layer(scheme, no_encoder_attn=not cross, **kwargs)
    randomize_(layer)
    reference = ReferenceLayer(scheme, DIMS, torch.tanh, cross).double()
    names = reference_names(scheme, cross)
    state = {names[name]: value for name, value in layer.named_parameters()}
    reference.load_state_dict(state, strict=True)
    return layer, reference, names


def assert_same(mine, theirs, x, names, layer, reference, tolerance=EXACT, **inputs):
    torch.testing.assert_close(mine, theirs, **tolerance)
    inputs = {"x": x, **inputs}
    ours, expected = gradients(mine, inputs, layer), gradients(theirs, inputs, reference)
    for name, gradient in ours.items():
        torch.testing.assert_close(
            gradient,
            expected[names.get(name, name)],
            **tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_layer_equals_reference(name, options, recompute):
    """Outputs and every gradient equal the paper's formula, on the fused attention path."""
    scheme = resolve_scheme(name, **options)
    if recompute and not scheme.ffn_hidden:
        pytest.skip("nothing to recompute")
    layer, reference, names = pair(scheme, recompute=recompute)
    x = stream()
    mask = causal_mask(T, x)
    mine, _, _ = layer(x, self_attn_mask=mask)
    assert_same(mine, reference(x, mask), x, names, layer, reference)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_layer_with_padding_and_cross_attention(name, options):
    """The same with key padding, cross-attention (upstream's unfused path) and encoder padding."""
    scheme = resolve_scheme(name, **options)
    layer, reference, names = pair(scheme, cross=True)
    x, memory = stream(), stream(seed=4)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[0, -2:] = True
    mask = causal_mask(T, x)
    mine, weights, _ = layer(
        x,
        encoder_out=memory,
        encoder_padding_mask=padding,
        self_attn_mask=mask,
        self_attn_padding_mask=padding,
        need_attn=True,
    )
    theirs = reference(x, mask, padding, memory, padding)
    assert weights is not None
    assert_same(mine, theirs, x, names, layer, reference, FP32_SOFTMAX, memory=memory)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_attention_path_gives_one_function(name, options):
    """need_weights, per-head weights, incremental decoding and the fused path agree."""
    scheme = resolve_scheme(name, **options)
    layer, _, _ = pair(scheme)
    layer.eval()
    x = stream().detach()
    mask = causal_mask(T, x)
    expected, _, _ = layer(x, self_attn_mask=mask)
    attention, a = layer.self_attn, x
    plain, _ = attention(a, a, a, attn_mask=mask, need_weights=False)
    for need in ({"need_weights": True}, {"need_head_weights": True}):
        out, weights = attention(a, a, a, attn_mask=mask, **need)
        torch.testing.assert_close(out, plain, **FP32_SOFTMAX)
        assert weights is not None
    state: dict = {}
    steps = [layer(x[t : t + 1], incremental_state=state)[0] for t in range(T)]
    torch.testing.assert_close(torch.cat(steps), expected, **FP32_SOFTMAX)


def test_upstream_normformer_layer():
    """With the head scale after the projection, the layer is upstream's own NormFormer layer."""
    flags = dict.fromkeys(("scale_attn", "scale_fc", "scale_heads", "scale_resids"), True)
    cfg = types.SimpleNamespace(**vars(layer_config()), **flags)
    upstream = TransformerDecoderLayerBase(cfg, no_encoder_attn=True).double()
    scheme = resolve_scheme("normformer", head_scale="after-out-proj", residual_scale=True)
    layer = build_layer(scheme)
    randomize_(layer)
    names = {
        name: name.replace("self_attn.output_norm", "attn_ln")
        .replace("fc2.hidden_norm", "ffn_layernorm")
        .replace("self_attn.head_scale", "c_attn")
        for name, _ in layer.named_parameters()
    }
    upstream.load_state_dict({names[n]: p for n, p in layer.named_parameters()}, strict=True)
    x = stream()
    mask = causal_mask(T, x)
    mine, theirs = layer(x, self_attn_mask=mask)[0], upstream(x, self_attn_mask=mask)[0]
    assert_same(mine, theirs, x, names, layer, upstream)


def test_head_scale_zero_removes_a_head():
    """A head scale of 0 before the projection equals zeroing that head's context vector."""
    scheme = resolve_scheme("preln", head_scale="before-out-proj")
    layer, _, _ = pair(scheme)
    x = stream().detach()
    attention = layer.self_attn
    with torch.no_grad():
        attention.out_proj.head_scale.fill_(1.0)
        attention.out_proj.head_scale[2] = 0.0
        scaled, _ = attention(x, x, x, need_weights=False)
        attention.out_proj.head_scale[2] = 1.0
        width = attention.head_dim
        attention.v_proj.weight[2 * width : 3 * width] = 0.0
        attention.v_proj.bias[2 * width : 3 * width] = 0.0
        removed, _ = attention(x, x, x, need_weights=False)
    torch.testing.assert_close(scaled, removed, **EXACT)


@pytest.mark.parametrize("activation", [choice.value for choice in ACTIVATIONS])
def test_hidden_norm_with_every_activation(activation):
    """The fused activation and norm equals the two modules one after the other."""
    scheme = resolve_scheme("normformer")
    layer = build_layer(scheme, activation_fn=activation)
    randomize_(layer)
    h = torch.randn(T, B, DIMS.d_ffn, dtype=torch.float64, requires_grad=True)
    fused = layer.fc2(h)
    fc2 = layer.fc2
    plain = torch.nn.functional.linear(fc2.hidden_norm(fc2.activation_fn(h)), fc2.weight, fc2.bias)
    torch.testing.assert_close(fused, plain, **EXACT)
    mine, theirs = gradients(fused, {"h": h}, fc2), gradients(plain, {"h": h}, fc2)
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], **EXACT)


def test_activation_dropout_comes_before_the_hidden_norm():
    """With activation dropout the order is act, dropout, norm, as upstream has it."""
    scheme = resolve_scheme("normformer")
    layer = build_layer(scheme, activation_dropout=0.5)
    randomize_(layer)
    fc2 = layer.fc2
    h = torch.randn(T, B, DIMS.d_ffn, dtype=torch.float64)
    torch.manual_seed(5)
    mine = fc2(h)
    torch.manual_seed(5)
    dropped = torch.nn.functional.dropout(fc2.activation_fn(h), 0.5)
    expected = torch.nn.functional.linear(fc2.hidden_norm(dropped), fc2.weight, fc2.bias)
    torch.testing.assert_close(mine, expected, **EXACT)
    layer.eval()
    assert not torch.equal(fc2(h), mine)
