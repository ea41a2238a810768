"""A copy task made of the standard library: each line translates to itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from labelled_corpus import docstring_and_code_lines


def short_lines(count: int, words: range = range(3, 9)) -> list[str]:
    """Return so many different docstring lines of 3 to 8 words, the same on every run."""
    lines = [line for line in docstring_and_code_lines()[0] if len(line.split()) in words]
    return lines[:: max(1, len(lines) // count)][:count]


def write_parallel(folder: Path, lines: Sequence[str], target: Sequence[str] = ()) -> list[str]:
    """Write ``copy.src`` and ``copy.tgt``; return the options of prepare that name them."""
    options = []
    for name, option, texts in (("src", "--source", lines), ("tgt", "--target", target or lines)):
        path = folder / f"copy.{name}"
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8", newline="\n")
        options += [option, str(path)]
    return options
