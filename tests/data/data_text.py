"""Text with everything that has gone wrong in tokenizers."""

from __future__ import annotations

WORDS = (
    "norm layer residual stream attention gain scale output input hidden width depth token batch "
    "gradient update weight bias kernel vector matrix model paper figure table result baseline "
    "before after between around without within against through"
).split()
ODD_LINES = (
    "emoji \U0001f600\U0001f468\u200d\U0001f469 and flags \U0001f1eb\U0001f1ee",
    "tab\there\tand\tthere",
    "\u6f22\u5b57\u3068\u4eee\u540d\u3092\u4f7f\u3046",
    "no-break\u00a0space and\u3000ideographic\u3000space",
    "two  spaces,  twice,   and three",
    "  led by spaces",
    "a plain <s> and </s> and <pad> and <unk> and <mask> in the text",
    "dots\u2026 and \u2581 and \ufb01 ligature",
    "x" * 6000,
    "",
)


def plain_lines(count: int) -> list[str]:
    """Return lines of plain words, each with its own number."""
    n = len(WORDS)
    return [
        f"{WORDS[i % n]} {WORDS[(i * 7 + i // n) % n]} the {WORDS[i // 3 % n]}, number {i}"
        for i in range(count)
    ]
