"""norms.py and gains.py: formulas, gradients, dtypes, what is kept, kernels."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from normplugin import kernels
from normplugin.gains import HeadScaledLinear, expand_head_scale
from normplugin.norms import Norm, activation_norm, activation_norm_linear
from normplugin.placement import NormSpec
from normplugin.reference import ReferenceNorm
from normplugin.testing import gradients, randomize_, saved_bytes

SPECS = [
    NormSpec(kind, eps, zero)
    for kind in ("layernorm", "rmsnorm")
    for eps in (1e-5, 0.1)
    for zero in (False, True)
]
D = 12
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def norms(spec: NormSpec, dtype=torch.float64) -> tuple[Norm, ReferenceNorm]:
    norm, reference = Norm(D, spec).to(dtype), ReferenceNorm(D, spec).to(dtype)
    randomize_(norm)
    reference.load_state_dict(norm.state_dict())
    return norm, reference


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_norm_equals_reference(spec):
    """Output and all gradients equal the formula in fp64."""
    norm, reference = norms(spec)
    x = torch.randn(5, 3, D, dtype=torch.float64, requires_grad=True)
    mine, theirs = norm(x), reference(x)
    torch.testing.assert_close(mine, theirs, **EXACT)
    ours, expected = gradients(mine, {"x": x}, norm), gradients(theirs, {"x": x}, reference)
    for name in ours:
        torch.testing.assert_close(ours[name], expected[name], **EXACT)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_activation_norm_gradcheck(spec):
    """Both fused functions have the gradient of their value, by finite differences."""
    norm, _ = norms(spec)
    linear = nn.Linear(D, 5).double()
    h = torch.randn(4, D, dtype=torch.float64, requires_grad=True)
    parameters = (*norm.parameters(), *linear.parameters())
    act = nn.functional.gelu
    assert torch.autograd.gradcheck(lambda h, *_: activation_norm(h, act, norm), (h, *parameters))
    assert torch.autograd.gradcheck(
        lambda h, *_: activation_norm_linear(h, act, norm, linear), (h, *parameters)
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_activation_norm_equals_modules(spec, bias):
    """The fused functions equal activation, norm and linear one after the other."""
    norm, _ = norms(spec)
    linear = nn.Linear(D, 5, bias=bias).double()
    chain = nn.ModuleList([norm, linear])
    h = torch.randn(4, 3, D, dtype=torch.float64, requires_grad=True)
    act = torch.tanh
    expected = linear(norm(act(h)))
    wanted = gradients(expected, {"h": h}, chain)
    for fused in (
        linear(activation_norm(h, act, norm)),
        activation_norm_linear(h, act, norm, linear),
    ):
        torch.testing.assert_close(fused, expected, **EXACT)
        found = gradients(fused, {"h": h}, chain)
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", ["same", "float32"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_low_precision_rounds_once(spec, parameters, dtype):
    """Low-precision input gives the fp32 result rounded once, in the input's dtype."""
    norm, reference = norms(spec, torch.float32)
    if parameters == "same":
        norm.to(dtype)
        reference.load_state_dict({k: v.float() for k, v in norm.state_dict().items()})
    x = torch.randn(6, D, dtype=torch.float32).to(dtype)
    mine = norm(x)
    assert mine.dtype == dtype
    # One rounding of fp32 results that differ by some fp32 roundings: at most one unit apart.
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(mine, reference(x.float()).to(dtype), rtol=unit, atol=unit / 64)
    h = x.detach().requires_grad_()
    activation_norm(h, torch.tanh, norm).sum().backward()
    assert h.grad.dtype == dtype and h.grad.isfinite().all()


def test_small_zero_centred_gain_is_not_lost():
    """A gain of 1 + 2^-8 stored as an offset acts on bf16 input, with bf16 and fp32 storage."""
    spec = NormSpec("rmsnorm", 1e-5, True)
    x = torch.randn(64, D).bfloat16()
    for storage in (torch.bfloat16, torch.float32):
        norm = Norm(D, spec).to(storage)
        nn.init.constant_(norm.weight, 2.0**-8)
        wide = x.float()
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + 2.0**-8)
        torch.testing.assert_close(norm(x), expected.bfloat16(), rtol=2.0**-8, atol=0.0)
        assert not torch.equal(norm(x), Norm(D, spec).to(storage)(x))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_large_fp16_input_stays_finite(kind):
    """Squares of 3e4 leave fp16's range; the statistics are taken in fp32."""
    x = torch.full((2, D), 3e4, dtype=torch.float16)
    x[:, ::2] *= -1
    out = Norm(D, NormSpec(kind, 1e-5, False)).half()(x)
    assert out.isfinite().all() and out.abs().max() > 0.9


def test_neutral_start():
    """Gains start at 1 whatever the storage, or at ``init``."""
    for zero in (False, True):
        assert Norm(3, NormSpec("rmsnorm", 1e-5, zero)).gain.tolist() == [1.0] * 3
        assert Norm(3, NormSpec("layernorm", 1e-5, zero), init=0.5).gain.tolist() == [0.5] * 3


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_what_is_kept_for_the_backward(kind):
    """The norm keeps its input, the fused functions keep h: one activation and the statistics."""
    spec, tokens, width = NormSpec(kind, 1e-5, False), 32, 256
    norm, linear = Norm(width, spec), nn.Linear(width, 8)
    x = torch.randn(tokens, width, requires_grad=True)
    statistics = tokens * 4 * (2 if kind == "layernorm" else 1)
    activation = tokens * width * 4
    gelu = nn.functional.gelu
    kept = {
        "norm": saved_bytes(lambda: norm(x * 1)),
        "fused": saved_bytes(lambda: activation_norm(x * 1, gelu, norm)),
        "rebuilt": saved_bytes(lambda: activation_norm_linear(x * 1, gelu, norm, linear)),
    }
    assert kept == dict.fromkeys(kept, activation + statistics)


def test_head_scaled_linear():
    """Weight read or module called: both are W diag(g); W itself is what is stored."""
    linear = nn.Linear(8, 6)
    stored = linear.weight.detach().clone()
    linear.__class__ = HeadScaledLinear
    linear.add_head_scale(4)
    randomize_(linear)
    raw = linear.state_dict()["weight"]
    x = torch.randn(3, 8)
    expected = nn.functional.linear(x * expand_head_scale(linear.head_scale, 8), raw, linear.bias)
    torch.testing.assert_close(linear(x), expected)
    torch.testing.assert_close(nn.functional.linear(x, linear.weight, linear.bias), expected)
    assert [n for n, _ in linear.named_parameters()] == ["weight", "bias", "head_scale"]
    assert raw.shape == stored.shape
    loaded = HeadScaledLinear(8, 6)
    loaded.add_head_scale(4)
    loaded.load_state_dict(linear.state_dict())
    torch.testing.assert_close(loaded(x), expected)


def test_head_scaled_linear_with_flattened_parameters():
    """A sharding wrapper that swaps the parameter for a view keeps the scale."""
    linear = HeadScaledLinear(8, 6)
    linear.add_head_scale(4)
    randomize_(linear)
    x = torch.randn(3, 8)
    expected = linear(x)
    view = linear._parameters["weight"].detach().clone()
    del linear.weight
    linear.weight = view
    torch.testing.assert_close(linear(x), expected)


def stub_apex(monkeypatch, **functions) -> None:
    module = types.ModuleType("apex.normalization.fused_layer_norm")
    for name, function in functions.items():
        setattr(module, name, function)
    for name in ("apex", "apex.normalization"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kernels.apex_norm.cache_clear()


@pytest.fixture
def no_cached_probe():
    yield
    kernels.apex_norm.cache_clear()


def test_apex_that_cannot_run_is_not_used(monkeypatch, caplog, no_cached_probe):
    """apex that imports but lacks its compiled part gives torch's norm and one warning."""

    def broken(*_):
        raise ModuleNotFoundError("No module named 'fused_layer_norm_cuda'")

    stub_apex(monkeypatch, fused_layer_norm_affine=broken, fused_rms_norm_affine=broken)
    monkeypatch.setattr(kernels.torch, "ones", lambda *a, device=None: torch.zeros(*a) + 1.0)
    assert kernels.apex_norm("layernorm", "cuda") is None
    assert kernels.apex_norm("layernorm", "cuda") is None
    assert len([r for r in caplog.records if "does not run" in r.message]) == 1


def test_apex_is_chosen_by_the_tensors_device(monkeypatch, no_cached_probe):
    """With a working apex, CUDA tensors take it and CPU tensors take torch's norm."""

    def fused(x, gain, bias, shape, eps):
        return nn.functional.layer_norm(x, shape, gain, bias, eps)

    stub_apex(monkeypatch, fused_layer_norm_affine=fused)
    monkeypatch.setattr(kernels.torch, "ones", lambda *a, device=None: torch.zeros(*a) + 1.0)
    assert kernels.apex_norm("layernorm", "cuda") is not None
    assert kernels.apex_norm("layernorm", "cpu") is None
    names = list(Norm(4, NormSpec("layernorm", 1e-5, False)).state_dict())
    assert names == ["weight", "bias"]
