"""The oracle against formulas it shares no code with: torch's layers, and lines written here."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.func import functional_call
from torch.nn import functional as F
from torch.testing import assert_close

from normplugin.errors import SchemeError
from normplugin.placement import NAMED_SCHEMES, SCHEMES, Dims, NormSpec, resolve_scheme
from normplugin.reference import ReferenceLayer, ReferenceNorm, causal_mask, gelu, relu
from normplugin.testing import gradients, randomize_

DIMS = Dims(n_layers=2, d_model=12, d_ffn=20, n_heads=3)
SEQ, BATCH, MEMORY = 5, 2, 4
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def make(scheme, dims=DIMS, **kwargs):
    """A randomised layer and inputs for it; the seed is fixed."""
    torch.manual_seed(7)
    layer = ReferenceLayer(scheme, dims, **kwargs).double()
    randomize_(layer)
    x = torch.randn(SEQ, BATCH, dims.d_model, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(MEMORY, BATCH, dims.d_model, dtype=torch.float64, requires_grad=True)
    return layer, x, memory


def agree(module, y, expected, **inputs):
    """Outputs and the gradients of inputs and parameters agree to 1e-10."""
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs, module), gradients(expected, inputs, module), **EXACT)


def promised(scheme, dims, cross_attention=False):
    """Name and shape of every parameter the sites of a layer promise."""
    found = {}
    for site in scheme.layer_sites(cross_attention):
        for parameter in scheme.site_parameters(site):
            name = f"{site}.{parameter}" if site.is_norm else str(site)
            found[name] = (dims.width(site.width),)
    return found


LINEAR = (".q.", ".k.", ".v.", ".out.", ".fc1.", ".fc2.")


@pytest.mark.parametrize("name", SCHEMES)
def test_parameters_are_the_linears_and_the_promised_sites(name):
    """A layer has the linears, the parameters its scheme promises, and nothing else."""
    mixes = itertools.product(
        ("layernorm", "rmsnorm"),
        (None, "none", "before-out-proj", "after-out-proj"),
        (False, True),
        (None, "none", "head", "full"),
        (False, True),
    )
    for norm_type, head_scale, residual_scale, qk_norm, cross in mixes:
        scheme = resolve_scheme(
            name,
            norm_type=norm_type,
            head_scale=head_scale,
            residual_scale=residual_scale,
            qk_norm=qk_norm,
        )
        layer = ReferenceLayer(scheme, DIMS, cross_attention=cross)
        shapes = {n: tuple(p.shape) for n, p in layer.named_parameters()}
        extra = {n: s for n, s in shapes.items() if not any(part in n for part in LINEAR)}
        assert extra == promised(scheme, DIMS, cross)
        assert len(shapes) - len(extra) == (20 if cross else 12)
        assert list(layer.state_dict()) == list(shapes)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_gains_start_neutral_and_output_gains_where_told(zero_centered):
    """Gains act as 1, those of B as output_norm_init; biases start at 0 and scales at 1."""
    scheme = resolve_scheme(
        "periln",
        norm_zero_centered=zero_centered,
        head_scale="before-out-proj",
        residual_scale=True,
        qk_norm="head",
        output_norm_init=0.25,
    )
    offset = 1.0 if zero_centered else 0.0
    for name, p in ReferenceLayer(scheme, DIMS, cross_attention=True).named_parameters():
        if any(part in name for part in LINEAR):
            continue
        start = 0.0 if name.endswith("bias") else 1.0
        if name.endswith("weight"):
            start = (0.25 if ".output." in name else 1.0) - offset
        assert_close(p.data, torch.full_like(p, start), rtol=0, atol=0)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("type_", ["layernorm", "rmsnorm"])
def test_norms_equal_torchs(type_, zero_centered):
    """Norm and gradients equal torch.nn.functional's, with an eps large enough to matter."""
    torch.manual_seed(1)
    norm = ReferenceNorm(6, NormSpec(type_, 0.3, zero_centered)).double()
    randomize_(norm)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    gain = norm.weight + 1.0 if zero_centered else norm.weight
    if type_ == "layernorm":
        expected = F.layer_norm(x, (6,), gain, norm.bias, 0.3)
    else:
        expected = F.rms_norm(x, (6,), gain, 0.3)
    agree(norm, norm(x), expected, x=x)


def test_activations_equal_torchs():
    """The exact GELU and the ReLU are torch's."""
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    assert_close(gelu(x), F.gelu(x), **EXACT)
    assert_close(relu(x), F.relu(x), **EXACT)


def in_our_names(tensors, name, cross):
    """Tensors of a torch layer, {torch name: tensor}, under the reference's parameter names."""
    parts = ["attention", *(["cross_attention"] if cross else []), "ffn"]
    role = "input" if name == "preln" else "residual"
    modules = {f"norm{i}": f"{part}.{role}" for i, part in enumerate(parts, 1)}
    modules |= {"linear1": "ffn.fc1", "linear2": "ffn.fc2"}
    modules |= {"self_attn.out_proj": "attention.out"}
    modules |= {"multihead_attn.out_proj": "cross_attention.out"}
    ours = {}
    for key, tensor in tensors.items():
        module, _, kind = key.replace("in_proj_", "in_proj.").rpartition(".")
        if module.endswith("in_proj"):
            part = "attention" if module.startswith("self") else "cross_attention"
            ours |= {f"{part}.{n}.{kind}": t for n, t in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            ours[f"{modules[module]}.{kind}"] = tensor
    return ours


@pytest.mark.parametrize(("activation", "torchs"), [(gelu, "gelu"), (relu, "relu")])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("name", ["preln", "postln"])
def test_preln_and_postln_equal_torchs_layers(name, cross, activation, torchs):
    """Pre-LN and Post-LN are torch's encoder and decoder layers: outputs and all gradients."""
    ours, x, memory = make(resolve_scheme(name), activation=activation, cross_attention=cross)
    kind = nn.TransformerDecoderLayer if cross else nn.TransformerEncoderLayer
    theirs = kind(12, 3, 20, 0.0, torchs, 1e-5, norm_first=name == "preln").double()
    randomize_(theirs)
    ours.load_state_dict(in_our_names(theirs.state_dict(), name, cross), strict=True)
    mask = causal_mask(SEQ, x)
    y = ours(x, mask, memory=memory if cross else None)
    expected = theirs(x, memory, mask) if cross else theirs(x, mask)
    assert_close(y, expected, **EXACT)
    inputs = {"x": x, "memory": memory} if cross else {"x": x}
    mine, other = gradients(y, inputs, ours), gradients(expected, inputs, theirs)
    for key in inputs:
        assert_close(mine.pop(key), other.pop(key), **EXACT)
    assert_close(mine, in_our_names(other, name, cross), **EXACT)


class Hand:
    """The words of the formulas below, on the parameters of one layer."""

    def __init__(self, layer, eps=1e-5, rms=False):
        self.p, self.eps, self.rms = dict(layer.named_parameters()), eps, rms

    def lin(self, name, x):
        """The linear called name."""
        return F.linear(x, self.p[f"{name}.weight"], self.p[f"{name}.bias"])

    def ln(self, name, x):
        """The norm called name, by torch."""
        weight, bias = self.p[f"{name}.weight"], self.p.get(f"{name}.bias")
        if self.rms:
            return F.rms_norm(x, x.shape[-1:], weight, self.eps)
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)

    def heads(self, q, k, v, mask=None):
        """Softmax attention by torch; (S, B, D) or (S, B, H, K) each -> (S, B, H, K)."""
        q, k, v = (t.reshape(*t.shape[:2], DIMS.n_heads, -1).permute(1, 2, 0, 3) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask).permute(2, 0, 1, 3)


def test_periln_equals_the_papers_lines():
    """Peri-LN: x + N_out(F(N_in(x))) for attention and FFN."""
    layer, x, _ = make(resolve_scheme("periln", norm_eps=0.1))
    h, mask = Hand(layer, eps=0.1), causal_mask(SEQ, x)
    a = h.ln("attention.input", x)
    heads = h.heads(*(h.lin(f"attention.{n}", a) for n in "qkv"), mask)
    x1 = x + h.ln("attention.output", h.lin("attention.out", heads.flatten(2)))
    f = h.lin("ffn.fc2", F.gelu(h.lin("ffn.fc1", h.ln("ffn.input", x1))))
    agree(layer, layer(x, mask), x1 + h.ln("ffn.output", f), x=x)


@pytest.mark.parametrize("where", ["before-out-proj", "after-out-proj"])
def test_normformer_equals_the_papers_lines(where):
    """NormFormer with residual scale; the head scale before W_O (paper) or after it (fairseq)."""
    layer, x, _ = make(resolve_scheme("normformer", residual_scale=True, head_scale=where))
    h, mask = Hand(layer), causal_mask(SEQ, x)
    g = h.p["attention.head_scale"]
    a = h.ln("attention.input", x)
    heads = h.heads(*(h.lin(f"attention.{n}", a) for n in "qkv"), mask)
    if where == "before-out-proj":
        f = h.lin("attention.out", torch.cat([g[i] * heads[:, :, i] for i in range(3)], dim=-1))
    else:
        f = h.lin("attention.out", heads.flatten(2)) * g.repeat_interleave(DIMS.head_dim)
    x1 = x + h.ln("attention.output", f)
    hidden = h.ln("ffn.hidden", F.gelu(h.lin("ffn.fc1", h.ln("ffn.input", x1))))
    expected = h.p["ffn.residual_scale"] * x1 + h.lin("ffn.fc2", hidden)
    agree(layer, layer(x, mask), expected, x=x)


def test_outputln_equals_olmo_2s_lines():
    """Output-LN: x + N(F(x)), RMSNorm over the whole width of q and k before the split."""
    layer, x, _ = make(resolve_scheme("outputln", norm_type="rmsnorm"))
    h, mask = Hand(layer, rms=True), causal_mask(SEQ, x)
    q = h.ln("attention.query", h.lin("attention.q", x))
    k = h.ln("attention.key", h.lin("attention.k", x))
    heads = h.heads(q, k, h.lin("attention.v", x), mask)
    x1 = x + h.ln("attention.output", h.lin("attention.out", heads.flatten(2)))
    f = h.lin("ffn.fc2", F.gelu(h.lin("ffn.fc1", x1)))
    agree(layer, layer(x, mask), x1 + h.ln("ffn.output", f), x=x)


def test_cross_attention_with_every_site_equals_its_lines():
    """A+B+C, per-head QK-norm, head and residual scale: keys and values are the encoder's, raw."""
    scheme = resolve_scheme("A+B+C", qk_norm="head", head_scale="before-out-proj")
    layer, x, memory = make(scheme, cross_attention=True)
    h, stream = Hand(layer), x
    for part in ("attention", "cross_attention"):
        a = h.ln(f"{part}.input", stream)
        source = a if part == "attention" else memory
        q, k = h.lin(f"{part}.q", a), h.lin(f"{part}.k", source)
        q = h.ln(f"{part}.query", q.unflatten(-1, (3, 4)))
        k = h.ln(f"{part}.key", k.unflatten(-1, (3, 4)))
        heads = h.heads(q, k, h.lin(f"{part}.v", source))
        heads = heads * h.p[f"{part}.head_scale"].view(1, 1, 3, 1)
        f = h.ln(f"{part}.output", h.lin(f"{part}.out", heads.flatten(2)))
        stream = h.ln(f"{part}.residual", stream + f)
    f = h.lin("ffn.fc2", F.gelu(h.lin("ffn.fc1", h.ln("ffn.input", stream))))
    expected = h.ln("ffn.residual", stream + h.ln("ffn.output", f))
    agree(layer, layer(x, memory=memory), expected, x=x, memory=memory)


@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("name", NAMED_SCHEMES)
def test_gradients_pass_gradcheck(name, norm_type):
    """Gradients of the input and of every parameter are the numerical ones."""
    scheme = resolve_scheme(name, norm_type=norm_type, residual_scale=name == "normformer")
    layer, _, _ = make(scheme, Dims(1, 4, 6, 2))
    x = torch.randn(3, 1, 4, dtype=torch.float64, requires_grad=True)
    keys, values = zip(*layer.named_parameters(), strict=True)
    mask = causal_mask(3, x)

    def run(x, *values):
        return functional_call(layer, dict(zip(keys, values, strict=True)), (x, mask))

    assert gradcheck(run, (x, *values))


def test_heads_must_divide_the_width():
    """A d_model that n_heads does not divide is refused."""
    with pytest.raises(SchemeError, match=r"d_model: got 10 with 3 heads; .* divisible by n_heads"):
        ReferenceLayer(resolve_scheme("preln"), Dims(1, 10, 20, 3))
