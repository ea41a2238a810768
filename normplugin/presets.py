"""Model sizes and architecture names, shared by both frameworks and ``describe``.

An architecture name is ``<scheme><suffix>``: ``normformer``, ``periln_tiny``, ``preln_125m``,
``postln_mlm_large``, ``periln_mt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from normplugin.errors import SchemeError, unknown_value
from normplugin.placement import NAMED_SCHEMES, Dims

# Suffix -> sizes. The empty suffix is fairseq's transformer_lm_gpt shape.
# 125m..2_7b: fairseq examples/normformer/train_lm.sh. 400m, 1_5b: Kim et al. 2025 (second-hand).
# 3_2b: the sources disagree on the depth; 32 layers and head width 128 continue 400m and 1_5b.
CAUSAL_SIZES: Mapping[str, Dims] = {
    "": Dims(12, 768, 3072, 12),
    "_tiny": Dims(4, 128, 512, 4),
    "_125m": Dims(12, 768, 3072, 12),
    "_355m": Dims(24, 1024, 4096, 16),
    "_1_3b": Dims(24, 2048, 8192, 32),
    "_2_7b": Dims(32, 2560, 10240, 32),
    "_400m": Dims(24, 1024, 4096, 8),
    "_1_5b": Dims(24, 2048, 8192, 16),
    "_3_2b": Dims(32, 2560, 10240, 20),
}
# RoBERTa base and large; fairseq's transformer (Vaswani et al. 2017, base).
MASKED_SIZES: Mapping[str, Dims] = {
    "_mlm": Dims(12, 768, 3072, 12),
    "_mlm_large": Dims(24, 1024, 4096, 16),
    "_mlm_tiny": CAUSAL_SIZES["_tiny"],
}
TRANSLATION_SIZES: Mapping[str, Dims] = {
    "_mt": Dims(6, 512, 2048, 8),
    "_mt_tiny": CAUSAL_SIZES["_tiny"],
}
SIZES: Mapping[str, Mapping[str, Dims]] = {
    "causal_lm": CAUSAL_SIZES,
    "masked_lm": MASKED_SIZES,
    "encoder_decoder": TRANSLATION_SIZES,
}


@dataclass(frozen=True)
class Architecture:
    """A registered architecture: its scheme, sizes and model kind."""

    name: str
    scheme: str
    dims: Dims
    kind: str


ARCHITECTURES: Mapping[str, Architecture] = {
    scheme + suffix: Architecture(scheme + suffix, scheme, dims, kind)
    for scheme in NAMED_SCHEMES
    for kind, sizes in SIZES.items()
    for suffix, dims in sizes.items()
}
_SUFFIXES = ", ".join(suffix for sizes in SIZES.values() for suffix in sizes if suffix)
LISTING = f"{', '.join(NAMED_SCHEMES)}, with or without a size ({_SUFFIXES})"


def architecture(name: str) -> Architecture:
    """Return the architecture called ``name``, or raise `SchemeError` with the nearest name."""
    try:
        return ARCHITECTURES[name]
    except KeyError:
        message = unknown_value("architecture", name, ARCHITECTURES, LISTING)
        raise SchemeError(message) from None


def sibling(arch: Architecture, kind: str) -> Architecture:
    """Return the architecture of another kind with this scheme, of the same sizes if there is."""
    others = [a for a in ARCHITECTURES.values() if (a.scheme, a.kind) == (arch.scheme, kind)]
    return next((a for a in others if a.dims == arch.dims), others[0])
