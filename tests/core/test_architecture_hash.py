"""Laws of the architecture hash and of the architecture names."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from normplugin.errors import SchemeError
from normplugin.placement import (
    NAMED_SCHEMES,
    SCHEMES,
    Dims,
    architecture_hash,
    resolve_scheme,
)
from normplugin.presets import ARCHITECTURES, CAUSAL_SIZES, architecture

BASE = Dims(n_layers=12, d_model=768, d_ffn=3072, n_heads=12)


def hash_of(name, kind="causal_lm", dims=BASE, **options):
    """Hash of a scheme at the base size."""
    return architecture_hash(resolve_scheme(name, **options), dims, kind)


def test_architecture_hashes_are_golden():
    """The hash is written into checkpoints and results: it never changes for an architecture."""
    golden = {
        ("preln", "causal_lm"): "fb76c947948a1ccb",
        ("postln", "causal_lm"): "3b89b8b948ebb2b9",
        ("periln", "causal_lm"): "a0c0bdb312d16244",
        ("normformer", "causal_lm"): "0dd3f715bc756d50",
        ("outputln", "causal_lm"): "f7375ffa327af0a3",
        ("periln", "masked_lm"): "547becdba3947150",
        ("periln", "encoder_decoder"): "61d3263fe545f6f6",
    }
    assert {key: hash_of(*key) for key in golden} == golden


def test_the_hash_ignores_the_name_and_sees_everything_else():
    """A+B and periln share a hash; eps, type, options, sizes and kind each change it."""
    assert hash_of("A+B") == hash_of("b+a") == hash_of("periln")
    assert hash_of("B", qk_norm="full") == hash_of("outputln") != hash_of("B")
    assert hash_of("periln", norm_eps=1e-5) == hash_of("periln")
    assert hash_of("periln", output_norm_init=0.1) == hash_of("periln")  # a start, not a function
    different = [
        hash_of("periln"),
        hash_of("periln", norm_eps=1e-6),
        hash_of("periln", norm_type="rmsnorm"),
        hash_of("periln", norm_zero_centered=True),
        hash_of("periln", head_scale="before-out-proj"),
        hash_of("periln", head_scale="after-out-proj"),
        hash_of("periln", residual_scale=True),
        hash_of("periln", qk_norm="head"),
        hash_of("periln", embedding_norm=True),
        hash_of("periln", kind="masked_lm"),
        hash_of("periln", dims=dataclasses.replace(BASE, n_layers=11)),
        hash_of("periln", dims=dataclasses.replace(BASE, n_heads=6)),
        *(hash_of(name) for name in SCHEMES if name not in ("periln", "A+B", "A", "C")),
    ]
    assert len(set(different)) == len(different)


def test_the_hash_refuses_an_unknown_kind():
    """A kind outside KINDS raises SchemeError."""
    with pytest.raises(SchemeError, match=r"model kind: got 'causal'; .*Did you mean 'causal_lm'"):
        hash_of("periln", kind="causal")


def test_architecture_names_are_scheme_and_size():
    """Each named causal architecture has its scheme and size; an unknown one names the nearest."""
    for scheme, suffix in itertools.product(NAMED_SCHEMES, CAUSAL_SIZES):
        found = architecture(scheme + suffix)
        assert (found.scheme, found.kind) == (scheme, "causal_lm")
        assert found.dims == CAUSAL_SIZES[suffix]
        assert found.dims.d_model % found.dims.n_heads == 0
    assert all(name == entry.name for name, entry in ARCHITECTURES.items())
    with pytest.raises(SchemeError, match=r"Did you mean 'periln_tiny'\?"):
        architecture("perlin_tiny")
