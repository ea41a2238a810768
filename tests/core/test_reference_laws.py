"""Laws of the oracle that need no second implementation: equivalences, scaling, masks, models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from normplugin.placement import NAMED_SCHEMES, SCHEMES, Dims, resolve_scheme
from normplugin.reference import ReferenceLayer, causal_mask
from normplugin.reference_model import (
    ReferenceDecoderLM,
    ReferenceEncoder,
    ReferenceEncoderDecoder,
)
from normplugin.testing import randomize_

DIMS = Dims(n_layers=2, d_model=12, d_ffn=20, n_heads=3)
SEQ, BATCH, VOCAB = 6, 2, 17
EXACT = {"rtol": 1e-10, "atol": 1e-10}
BITS = {"rtol": 0, "atol": 0}


def randomised(module):
    """The module in fp64 with every parameter random."""
    randomize_(module.double())
    return module


def stream(length=SEQ, seed=0, d_model=DIMS.d_model):
    """A random residual stream, (S, B, D)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, BATCH, d_model, generator=generator, dtype=torch.float64)
    return x.requires_grad_()


def tokens(length=SEQ, seed=0):
    """Random ids, (B, S)."""
    return torch.randint(VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("larger", "without", "smaller"),
    [
        ("periln", ["attention.output", "ffn.output"], "preln"),
        ("periln", ["attention.input", "ffn.input"], "B"),
        ("normformer", ["attention.head_scale", "attention.output", "ffn.hidden"], "preln"),
        ("outputln", ["attention.query", "attention.key"], "B"),
        ("A+C", ["attention.residual", "ffn.residual"], "A"),
        ("B+C", ["attention.output", "ffn.output"], "postln"),
        ("A+B+C", ["attention.residual", "ffn.residual"], "periln"),
    ],
)
def test_a_scheme_less_its_sites_is_the_smaller_scheme(larger, without, smaller):
    """Peri-LN with B off is Pre-LN, bit for bit; likewise for the other pairs."""
    ours = randomised(ReferenceLayer(resolve_scheme(larger), DIMS))
    for site in without:
        sublayer, role = site.split(".")
        setattr(ours.get_submodule(sublayer), role, None if "scale" in role else nn.Identity())
    theirs = ReferenceLayer(resolve_scheme(smaller), DIMS).double()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = stream()
    assert_close(ours(x), theirs(x), **BITS)


@pytest.mark.parametrize(("letters", "name"), [("A", "preln"), ("C", "postln"), ("b+a", "periln")])
def test_letters_are_the_named_scheme(letters, name):
    """A is Pre-LN, C is Post-LN and A+B is Peri-LN: the same parameters, the same function."""
    ours = randomised(ReferenceDecoderLM(resolve_scheme(letters), DIMS, VOCAB))
    theirs = ReferenceDecoderLM(resolve_scheme(name), DIMS, VOCAB).double()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert_close(ours(tokens()), theirs(tokens()), **BITS)


@pytest.mark.parametrize("where", ["before-out-proj", "after-out-proj"])
@pytest.mark.parametrize("name", NAMED_SCHEMES)
def test_scales_of_one_change_no_bit(name, where):
    """With head and residual scales at 1 the outputs are those without scales, bit for bit."""
    plain = randomised(ReferenceLayer(resolve_scheme(name, head_scale="none"), DIMS))
    scheme = resolve_scheme(name, head_scale=where, residual_scale=True)
    scaled = ReferenceLayer(scheme, DIMS).double()
    missing = scaled.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing == ["attention.head_scale", "ffn.residual_scale"]
    assert_close(scaled(stream()), plain(stream()), **BITS)


@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("linear", ["attention.out", "ffn.fc2"])
@pytest.mark.parametrize("name", ["periln", "outputln"])
def test_output_norms_cancel_the_scale_of_the_last_linear(name, linear, norm_type):
    """Without its bias, W_O or W_2 times c leaves the output; its gradient is divided by c."""
    c = 3.0  # eps 1e-14: the law holds up to eps / variance
    scheme = resolve_scheme(name, norm_type=norm_type, norm_eps=1e-14)
    layer, x = randomised(ReferenceLayer(scheme, DIMS)), stream()
    last = layer.get_submodule(linear)
    with torch.no_grad():
        last.bias.zero_()
    before = layer(x)
    (gradient,) = torch.autograd.grad((before**2).sum(), last.weight)
    with torch.no_grad():
        last.weight.mul_(c)
    after = layer(x)
    (scaled,) = torch.autograd.grad((after**2).sum(), last.weight)
    assert_close(after, before, **EXACT)
    assert_close(scaled * c, gradient, rtol=1e-9, atol=1e-9)  # gradients are of order 10


def test_zero_centred_gains_are_gains_less_one():
    """Stored w with zero-centred norms is the function of stored 1 + w with plain ones."""
    plain = randomised(ReferenceLayer(resolve_scheme("A+B+C", qk_norm="head"), DIMS))
    scheme = resolve_scheme("A+B+C", qk_norm="head", norm_zero_centered=True)
    centred = ReferenceLayer(scheme, DIMS).double()
    norms = {f"{site}.weight" for site in scheme.layer_sites() if site.is_norm}
    shifted = {k: v - 1.0 if k in norms else v for k, v in plain.state_dict().items()}
    centred.load_state_dict(shifted, strict=True)
    assert len(norms) == 8
    assert_close(centred(stream()), plain(stream()), **EXACT)


@pytest.mark.parametrize("head", range(DIMS.n_heads))
def test_a_head_scale_of_zero_removes_that_head(head):
    """g_k = 0 before W_O is W_O without the columns of head k; after W_O, without its rows."""
    part = slice(head * DIMS.head_dim, (head + 1) * DIMS.head_dim)
    for where in ("before-out-proj", "after-out-proj"):
        layer = randomised(ReferenceLayer(resolve_scheme("normformer", head_scale=where), DIMS))
        out, scale = layer.attention.out, layer.attention.head_scale
        with torch.no_grad():
            scale[head] = 0.0
        expected = layer(stream())
        with torch.no_grad():
            scale[head] = 1.0
            if where == "before-out-proj":
                out.weight[:, part] = 0.0
            else:
                out.weight[part], out.bias[part] = 0.0, 0.0
        assert_close(layer(stream()), expected, **EXACT)


def test_the_two_head_scales_are_different_functions():
    """Before and after W_O agree at 1 only: the scheme must say which."""
    before = randomised(ReferenceLayer(resolve_scheme("normformer"), DIMS))
    after = resolve_scheme("normformer", head_scale="after-out-proj")
    after = ReferenceLayer(after, DIMS).double()
    after.load_state_dict(before.state_dict(), strict=True)
    assert (before(stream()) - after(stream())).abs().max() > 1e-2


@pytest.mark.parametrize("name", SCHEMES)
def test_padded_keys_do_not_reach_real_positions(name):
    """What stands at padding, in the stream or the memory, leaves real positions untouched."""
    layer = randomised(ReferenceLayer(resolve_scheme(name), DIMS, cross_attention=True))
    padding = torch.zeros(BATCH, SEQ, dtype=torch.bool)
    padding[0, -2:] = padding[1, :1] = True
    real = ~padding.T
    x, memory = stream(), stream(seed=1)
    y = layer(x, None, padding, memory, padding)
    noise = 100.0 * stream(seed=2) * padding.T[:, :, None]
    changed = layer(x + noise, None, padding, memory + noise, padding)
    assert_close(changed[real], y[real], **BITS)
    for gradient in torch.autograd.grad(y[real].square().sum(), (x, memory)):
        assert_close(gradient[~real], torch.zeros_like(gradient[~real]), **BITS)
    unmasked = layer(x + noise, None, None, memory + noise, None)
    assert (unmasked[real] - y[real]).abs().max() > 1e-3  # the noise would be seen


@pytest.mark.parametrize("name", SCHEMES)
def test_the_future_does_not_reach_the_past(name):
    """With the causal mask, positions before t depend on nothing from t on."""
    layer = randomised(ReferenceLayer(resolve_scheme(name), DIMS))
    x, t = stream(), 3
    y = layer(x, causal_mask(SEQ, x))
    noise = torch.cat([torch.zeros(t, BATCH, 12), torch.ones(SEQ - t, BATCH, 12)]).double()
    assert_close(layer(x + noise * stream(seed=5), causal_mask(SEQ, x))[:t], y[:t], **BITS)
    (gradient,) = torch.autograd.grad(y[:t].square().sum(), x)
    assert_close(gradient[t:], torch.zeros_like(gradient[t:]), **BITS)


OPTIONS = [{}, {"norm_type": "rmsnorm", "embedding_norm": True, "residual_scale": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "options"])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("kind", [ReferenceDecoderLM, ReferenceEncoder, ReferenceEncoderDecoder])
def test_whole_models_run_and_train_every_parameter(kind, name, options):
    """Every kind of model of every scheme gives logits, and each parameter gets a gradient."""
    scheme = resolve_scheme(name, **options)
    model = randomised(kind(scheme, DIMS, VOCAB))
    inputs = (tokens(),) if kind is not ReferenceEncoderDecoder else (tokens(4, 1), tokens())
    logits = model(*inputs)
    assert logits.shape == (BATCH, SEQ, VOCAB)
    F.cross_entropy(logits.flatten(0, 1), tokens(seed=2).flatten()).backward()
    for key, p in model.named_parameters():
        if not key.endswith((".k.bias", ".key.bias")):  # softmax forgets a shift of all keys
            assert p.grad.abs().max() > 1e-9, key
    stacks = 2 if kind is ReferenceEncoderDecoder else 1
    keys = [key for key in model.state_dict() if "stack." in key and key.endswith("weight")]
    assert len(keys) == stacks * len(list(scheme.stack_sites()))


@pytest.mark.parametrize("kind", [ReferenceDecoderLM, ReferenceEncoder])
def test_embedding_and_tied_output_equal_their_lines(kind):
    """Without layers: logits = N_final(N_emb(scale * E[token] + positions)) E^T."""
    scheme = resolve_scheme("periln", embedding_norm=True)
    model = randomised(kind(scheme, Dims(0, 12, 20, 3), VOCAB))
    positions = stream()[:, 0].detach()
    p = dict(model.named_parameters())
    x = 3.0 * p["token_embedding.weight"][tokens()] + positions
    for site in ("embedding", "final"):
        x = F.layer_norm(x, (12,), p[f"stack.{site}.weight"], p[f"stack.{site}.bias"])
    expected = x @ p["token_embedding.weight"].T
    assert_close(model(tokens(), positions, embed_scale=3.0), expected, **EXACT)


def test_a_causal_model_sees_the_past_only_and_an_encoder_sees_all():
    """Changing the last token changes earlier logits of the encoder, never of the causal model."""
    changed = tokens()
    changed[:, -1] = (changed[:, -1] + 1) % VOCAB
    for kind, sees in ((ReferenceDecoderLM, False), (ReferenceEncoder, True)):
        model = randomised(kind(resolve_scheme("normformer"), DIMS, VOCAB))
        difference = (model(tokens()) - model(changed))[:, :-1].abs().max()
        assert bool(difference > 1e-6) is sees


def test_an_encoder_decoder_ignores_source_padding_and_sees_the_source():
    """Cut-off and padded source give the same logits; another source gives others."""
    model = randomised(ReferenceEncoderDecoder(resolve_scheme("periln"), DIMS, VOCAB))
    source, target = tokens(5, seed=1), tokens()
    padding = torch.zeros(BATCH, 5, dtype=torch.bool)
    padding[:, 3:] = True
    short = model(source[:, :3], target)
    assert_close(model(source, target, source_padding=padding), short, **EXACT)
    assert (model(source, target) - short).abs().max() > 1e-4


def test_an_encoder_decoder_equals_its_lines():
    """Each side gets its own tokens, positions and padding; the memory is normalised, un-causal."""
    model = randomised(ReferenceEncoderDecoder(resolve_scheme("normformer"), DIMS, VOCAB))
    source, target = tokens(4, seed=1), tokens()
    source_positions, target_positions = stream(4, seed=2)[:, 0], stream(seed=3)[:, 0]
    source_padding, target_padding = source > VOCAB, target > VOCAB
    source_padding[0, -1] = target_padding[1, -2:] = True
    side = model.encoder
    memory = (2.0 * side.token_embedding(source) + source_positions).transpose(0, 1)
    for layer in side.layers:
        memory = layer(memory, None, source_padding)
    memory, side = side.stack["final"](memory), model.decoder
    x = (2.0 * side.token_embedding(target) + target_positions).transpose(0, 1)
    for layer in side.layers:
        x = layer(x, causal_mask(SEQ, x), target_padding, memory, source_padding)
    logits = model(
        source,
        target,
        source_positions=source_positions,
        target_positions=target_positions,
        embed_scale=2.0,
        source_padding=source_padding,
        target_padding=target_padding,
    )
    expected = side.stack["final"](x).transpose(0, 1) @ side.token_embedding.weight.T
    assert_close(logits, expected, **EXACT)


def test_shared_embeddings_are_an_assignment():
    """With one embedding for both sides its gradient is the sum of the two separate ones."""
    model = randomised(ReferenceEncoderDecoder(resolve_scheme("preln"), DIMS, VOCAB))
    model.decoder.token_embedding.load_state_dict(model.encoder.token_embedding.state_dict())
    sides = [model.encoder.token_embedding.weight, model.decoder.token_embedding.weight]
    separate = torch.autograd.grad(model(tokens(4), tokens()).square().mean(), sides)
    model.decoder.token_embedding = model.encoder.token_embedding
    (shared,) = torch.autograd.grad(model(tokens(4), tokens()).square().mean(), sides[:1])
    assert_close(shared, separate[0] + separate[1], **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_dtypes_stay_in_their_dtype_and_near_fp64(dtype):
    """Any float in, the same float out, within 32 roundings of fp64 (about 16 ops per layer)."""
    layer = randomised(ReferenceLayer(resolve_scheme("normformer"), DIMS)).to(dtype)
    x = stream().detach().to(dtype)
    y = layer(x, causal_mask(SEQ, x))
    exact = layer.double()(x.double(), causal_mask(SEQ, x.double()))
    assert y.dtype == dtype
    bound = 32 * torch.finfo(dtype).eps
    assert_close(y.double(), exact, rtol=bound, atol=bound)
