"""Readable tables: markdown, with columns aligned."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.timing import Spread


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table; all columns but the first are aligned to the right."""
    widths = [max(2, *(len(row[i]) for row in (header, *rows))) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (c.rjust(w) for c, w in zip(cells, widths, strict=True))
        return "| " + " | ".join([cells[0].ljust(len(first)), *rest]) + " |"

    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def milliseconds(sample: Spread) -> str:
    """Median, and p20 to p80."""
    return f"{sample.p50 * 1e3:.4g} ({sample.p20 * 1e3:.4g}..{sample.p80 * 1e3:.4g})"


def ratio(sample: Spread) -> str:
    """Median, and its 95 % interval."""
    return f"{sample.p50:.3f} [{sample.low:.3f} {sample.high:.3f}]"
