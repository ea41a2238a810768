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
        ("preln", "causal_lm"): "af57cf553a2d6267",
        ("postln", "causal_lm"): "8879bf55faef15bb",
        ("periln", "causal_lm"): "c439e800b8121b05",
        ("normformer", "causal_lm"): "3e52f566b58177c4",
        ("outputln", "causal_lm"): "f8616a1cb7e9ed0b",
        ("periln", "masked_lm"): "05daea76a9aa70da",
        ("periln", "encoder_decoder"): "7793aa505734adc3",
    }
    assert {key: hash_of(*key) for key in golden} == golden


def test_the_hash_ignores_the_name_and_sees_everything_else():
    """A+B and periln share a hash; eps, type, options, sizes and kind each change it."""
    assert hash_of("A+B") == hash_of("b+a") == hash_of("periln")
    assert hash_of("B", qk_norm="full") == hash_of("outputln") != hash_of("B")
    assert hash_of("periln", norm_eps=1e-5) == hash_of("periln")
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
