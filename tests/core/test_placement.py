"""Laws of the vocabulary: what a scheme is, where its sites are, what is refused."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from normplugin.errors import SchemeError
from normplugin.placement import (
    HEAD_SCALES,
    LETTERS,
    NAMED_SCHEMES,
    NORM_TYPES,
    QK_NORMS,
    SCHEMES,
    Dims,
    canonical_name,
    resolve_scheme,
)
from normplugin.presets import CAUSAL_SIZES

BASE = Dims(n_layers=12, d_model=768, d_ffn=3072, n_heads=12)


def names(scheme, **kwargs):
    """The layer sites of a scheme as text."""
    return [str(site) for site in scheme.layer_sites(**kwargs)]


def total(scheme, dims=BASE, cross_attention=False):
    """All norm and scale parameters of a whole stack."""
    layer = sum(scheme.count(s, dims) for s in scheme.layer_sites(cross_attention))
    return dims.n_layers * layer + sum(scheme.count(s, dims) for s in scheme.stack_sites())


def test_there_are_five_names_and_seven_letter_sets():
    """SCHEMES is the five named schemes, then every non-empty set of the letters A, B, C."""
    assert NAMED_SCHEMES == ("preln", "postln", "periln", "normformer", "outputln")
    sets = {"+".join(letters) for n in (1, 2, 3) for letters in itertools.combinations("ABC", n)}
    assert set(LETTERS) == sets
    assert SCHEMES == NAMED_SCHEMES + LETTERS


@pytest.mark.parametrize("name", SCHEMES)
def test_every_mix_of_legal_options_resolves(name):
    """Every scheme takes every legal option, and its sites are unique."""
    mixes = itertools.product(
        NORM_TYPES, (False, True), HEAD_SCALES, (False, True), QK_NORMS, (False, True)
    )
    for norm_type, centred, head_scale, residual_scale, qk_norm, embedding in mixes:
        scheme = resolve_scheme(
            name,
            norm_type=norm_type,
            norm_zero_centered=centred,
            head_scale=head_scale,
            residual_scale=residual_scale,
            qk_norm=qk_norm,
            embedding_norm=embedding,
        )
        sites = [str(s) for s in (*scheme.layer_sites(True), *scheme.stack_sites())]
        assert len(sites) == len(set(sites))
        assert ("attention.head_scale" in sites) == (head_scale != "none")
        assert ("cross_attention.head_scale" in sites) == (head_scale != "none")
        assert ("attention.query" in sites) == ("attention.key" in sites) == (qk_norm != "none")
        assert ("ffn.residual_scale" in sites) == residual_scale
        assert ("stack.embedding" in sites) == embedding


SITES = {
    "preln": "attention.input ffn.input",
    "postln": "attention.residual ffn.residual",
    "periln": "attention.input attention.output ffn.input ffn.output",
    "normformer": "attention.input attention.head_scale attention.output ffn.input ffn.hidden",
    "outputln": "attention.query attention.key attention.output ffn.output",
    "A": "attention.input ffn.input",
    "B": "attention.output ffn.output",
    "C": "attention.residual ffn.residual",
    "A+B": "attention.input attention.output ffn.input ffn.output",
    "A+C": "attention.input attention.residual ffn.input ffn.residual",
    "B+C": "attention.output attention.residual ffn.output ffn.residual",
    "A+B+C": "attention.input attention.output attention.residual "
    "ffn.input ffn.output ffn.residual",
}


@pytest.mark.parametrize("name", SCHEMES)
def test_sites_stand_in_the_order_of_the_forward_pass(name):
    """A layer's sites are those of design.md's table, in the order in which they are computed."""
    assert " ".join(names(resolve_scheme(name))) == SITES[name]


def test_the_fullest_attention_keeps_the_order_too():
    """Input, query, key, head scale, output, residual: the order of the attention sublayer."""
    scheme = resolve_scheme("a+b+c", head_scale="after-out-proj", qk_norm="head")
    roles = ["input", "query", "key", "head_scale", "output", "residual"]
    assert names(scheme)[:6] == [f"attention.{role}" for role in roles]


@pytest.mark.parametrize("name", SCHEMES)
def test_cross_attention_repeats_the_attention_sites(name):
    """Cross-attention has the sites of self-attention, between self-attention and FFN."""
    scheme = resolve_scheme(name, head_scale="before-out-proj", qk_norm="head")
    plain = names(scheme)
    attention = [site for site in plain if site.startswith("attention.")]
    ffn = [site for site in plain if site.startswith("ffn.")]
    cross = [f"cross_{site}" for site in attention]
    assert names(scheme, cross_attention=True) == attention + cross + ffn


@pytest.mark.parametrize("name", SCHEMES)
def test_the_final_norm_is_missing_exactly_where_the_stream_is_normalised(name):
    """A scheme has a final norm unless C already normalises the residual stream."""
    sites = [str(site) for site in resolve_scheme(name).stack_sites()]
    assert sites == ([] if name == "postln" or "C" in name else ["stack.final"])


def test_the_embedding_norm_comes_before_the_final_norm():
    """The embedding norm is a stack site of any scheme, first in order."""
    sites = [str(site) for site in resolve_scheme("periln", embedding_norm=True).stack_sites()]
    assert sites == ["stack.embedding", "stack.final"]


@pytest.mark.parametrize("dims", [BASE, CAUSAL_SIZES["_tiny"], Dims(3, 20, 50, 5)])
def test_extra_parameters_equal_the_papers_formulas(dims):
    """Parameters beyond Pre-LN: NormFormer L(2d+2f+h), Peri-LN 4Ld, Output-LN 4Ld, Post-LN -2d."""
    n, d, f, h = dims.n_layers, dims.d_model, dims.d_ffn, dims.n_heads
    preln = total(resolve_scheme("preln"), dims)
    assert preln == n * 4 * d + 2 * d
    assert total(resolve_scheme("normformer"), dims) - preln == n * (2 * d + 2 * f + h)
    assert total(resolve_scheme("periln"), dims) - preln == n * 4 * d
    assert total(resolve_scheme("outputln"), dims) - preln == n * 4 * d
    assert total(resolve_scheme("postln"), dims) - preln == -2 * d


def test_normformer_125m_adds_the_papers_hundred_thousand():
    """12 layers of 768/3072/12 gain 92,304 parameters, 9,216 more with the residual scale."""
    preln = total(resolve_scheme("preln"))
    assert total(resolve_scheme("normformer")) - preln == 92_304
    assert total(resolve_scheme("normformer", residual_scale=True)) - preln == 92_304 + 9_216


def test_rmsnorm_has_no_bias():
    """With RMSNorm every norm has half the parameters: Peri-LN adds 2d per layer, scales stay."""
    preln = resolve_scheme("preln", norm_type="rmsnorm")
    extra = total(resolve_scheme("periln", norm_type="rmsnorm")) - total(preln)
    assert extra == 12 * 2 * 768
    normformer = resolve_scheme("normformer", norm_type="rmsnorm")
    assert total(normformer) - total(preln) == 12 * (768 + 3072 + 12)
    site = next(normformer.layer_sites())
    assert normformer.site_parameters(site) == ("weight",)


def test_qk_norm_width():
    """Per head, one gain vector of head_dim serves all heads; full is as wide as d_model."""
    for option, width in (("head", "head_dim"), ("full", "d_model")):
        scheme = resolve_scheme("preln", qk_norm=option)
        qk = [s for s in scheme.layer_sites() if s.role in ("query", "key")]
        assert [s.width for s in qk] == [width, width]
        assert [scheme.count(s, BASE) for s in qk] == [2 * BASE.width(width)] * 2
    assert BASE.head_dim == 64


def test_norms_and_scales_are_told_apart():
    """A scale is one parameter called like its role; a norm has weight and bias."""
    scheme = resolve_scheme("normformer", residual_scale=True)
    for site in scheme.layer_sites():
        scale = site.role in ("head_scale", "residual_scale")
        assert site.is_norm is not scale
        expected = (site.role,) if scale else ("weight", "bias")
        assert scheme.site_parameters(site) == expected


def test_defaults_are_layernorm_1e_5_and_neutral_gains():
    """Without options: LayerNorm, eps 1e-5, plain gains that start at 1."""
    scheme = resolve_scheme("preln")
    assert dataclasses.astuple(scheme.norm) == ("layernorm", 1e-5, False)
    assert scheme.output_norm_init == 1.0
    assert resolve_scheme("periln", norm_eps=1e-6).norm.eps == 1e-6
    assert resolve_scheme("periln", output_norm_init=0).output_norm_init == 0.0


@pytest.mark.parametrize(
    ("typed", "canonical"),
    [
        ("b+a", "A+B"),
        ("C+b+A", "A+B+C"),
        ("c", "C"),
        (" PeriLN ", "periln"),
        ("OUTPUTLN", "outputln"),
    ],
)
def test_case_and_order_of_letters_do_not_matter(typed, canonical):
    """Names in any case and letters in any order mean the same scheme."""
    assert canonical_name(typed) == canonical
    assert resolve_scheme(typed) == resolve_scheme(canonical)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("perilm", r"--norm-scheme: got 'perilm'; legal are preln, .*Did you mean 'periln'\?"),
        ("normfomer", r"Did you mean 'normformer'\?"),
        ("AB", r"Did you mean 'A\+B'\?"),
        ("A+D", r"got 'A\+D'"),
        ("", r"got ''"),
        ("A+", r"got 'A\+'"),
        ("sandwich", r"legal are preln, postln, periln, normformer, outputln, A, B, C, A\+B"),
    ],
)
def test_unknown_schemes_are_refused_with_the_nearest_name(typed, message):
    """An unknown name raises SchemeError that names the legal ones and the nearest of them."""
    with pytest.raises(SchemeError, match=message):
        resolve_scheme(typed)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"norm_type": "rmsnrm"}, r"--norm-type: got 'rmsnrm'; .*Did you mean 'rmsnorm'\?"),
        ({"head_scale": "before"}, r"--head-scale: got 'before'; legal are none, before-out-proj"),
        ({"qk_norm": "heads"}, r"--qk-norm: got 'heads'; .*Did you mean 'head'\?"),
        ({"norm_eps": 0.0}, r"--norm-eps: got 0.0; legal is 0 < eps < 1\. Try 1e-5\."),
        ({"norm_eps": -1e-5}, r"--norm-eps: got -1e-05"),
        ({"norm_eps": 1.0}, r"--norm-eps: got 1.0"),
        ({"norm_eps": float("nan")}, r"--norm-eps: got nan"),
        ({"norm_eps": "small"}, r"--norm-eps: got 'small'; legal are finite numbers"),
        ({"output_norm_init": float("inf")}, r"--output-norm-init: got inf; legal are finite"),
        ({"qk_norm": ""}, r"--qk-norm: got ''; legal are none, head, full"),
    ],
)
def test_illegal_options_are_refused_by_name(option, message):
    """An illegal value raises SchemeError with the option, the value and the legal ones."""
    with pytest.raises(SchemeError, match=message):
        resolve_scheme("periln", **option)


@pytest.mark.parametrize("name", ["preln", "postln", "A", "C", "A+C"])
def test_output_norm_init_needs_an_output_norm(name):
    """A start for the output gains is refused where there is no output norm, even at 1."""
    with pytest.raises(SchemeError, match=r"--output-norm-init: got 1.0; scheme .* no output norm"):
        resolve_scheme(name, output_norm_init=1.0)


def test_one_output_norm_is_enough_for_output_norm_init():
    """NormFormer has B after attention only, and takes a start for its gains."""
    assert resolve_scheme("normformer", output_norm_init=0.5).output_norm_init == 0.5


def test_schemes_are_frozen_and_comparable():
    """A scheme is a value: immutable, hashable, equal when made alike."""
    scheme = resolve_scheme("periln")
    with pytest.raises(dataclasses.FrozenInstanceError):
        scheme.attention = "A"
    assert {scheme, resolve_scheme("periln")} == {scheme}
