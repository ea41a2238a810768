"""From a summed loss to perplexity per token, per word and bits per byte.

    per token  exp(nats / T)             T tokens scored
    per word   exp(nats / W)             W words of the raw text
    per byte   nats / (B ln 2)           B bytes of the raw text

Per token depends on the vocabulary; per word and per byte do not, and compare tokenizers. The eos
of every document is one of the T tokens by default. To leave it out, sum the loss without it and
take T from `SplitCounts.predicted(eos=False)`; W and B stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from normplugin.errors import DataError


@dataclass(frozen=True)
class Units:
    """One loss in every unit."""

    nats_per_token: float
    token_perplexity: float
    word_perplexity: float
    bits_per_byte: float


def from_nats(nats: float, tokens: int, words: int, n_bytes: int) -> Units:
    """Return the units of a loss summed over a text.

    Args:
        nats: Summed negative log-likelihood.
        tokens: Tokens it was summed over.
        words: Words of the raw text, see `SplitCounts.words`.
        n_bytes: Bytes of the raw text, see `SplitCounts.bytes`.

    Raises:
        DataError: A count that is not positive.
    """
    for what, count in (("tokens", tokens), ("words", words), ("bytes", n_bytes)):
        if count <= 0:
            raise DataError(f"{what}: got {count}; legal is 1 or more. Score a text that has some.")
    return Units(
        nats_per_token=nats / tokens,
        token_perplexity=_exp(nats / tokens),
        word_perplexity=_exp(nats / words),
        bits_per_byte=nats / (n_bytes * math.log(2.0)),
    )


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
