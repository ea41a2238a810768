"""A small real classification set: is a line of the standard library docstring or code?"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from normplugin.data.default_corpus import default_corpus

_FILES = 200


@cache
def docstring_and_code_lines() -> tuple[list[str], list[str]]:
    """Return different stripped lines of 3 words or more, without tabs, of a part of the corpus."""
    docstrings: dict[str, None] = {}
    code: dict[str, None] = {}
    sources = default_corpus("file").sources
    for source in sources[:: len(sources) // _FILES]:
        text = source.path.read_text(encoding="utf-8")
        prose = _docstring_line_numbers(ast.parse(text))
        for number, line in enumerate(text.split("\n"), start=1):
            line = line.strip(' "\t')  # without the quotes that would give a docstring away
            if len(line.split()) >= 3 and "\t" not in line:
                (docstrings if number in prose else code)[line] = None
    return list(docstrings), [line for line in code if line not in docstrings]


def write_labelled(folder: Path, count: int = 2000, columns: int = 1, scores: bool = False) -> Path:
    """Write ``labelled.tsv`` with so many lines, half of them docstring; return its path.

    Args:
        folder: An existing folder.
        count: Lines.
        columns: 2 adds a second text, which is docstring in every other pair of lines.
        scores: Label by a number, the share of letters, instead of ``doc`` and ``code``.
    """
    docstrings, code = (_spread(lines, count // 2) for lines in docstring_and_code_lines())
    rows = []
    for i in range(count):
        text = (code if i % 2 else docstrings)[i // 2]
        label = (
            f"{sum(map(str.isalpha, text)) / len(text):.4f}" if scores else ("doc", "code")[i % 2]
        )
        second = [(code if i // 2 % 2 else docstrings)[-1 - i // 2]] if columns == 2 else []
        rows.append("\t".join([label, text, *second]))
    path = folder / "labelled.tsv"
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8", newline="\n")
    return path


def _spread(lines: list[str], count: int) -> list[str]:
    assert len(lines) >= count, f"the corpus has {len(lines)} lines"
    return lines[:: len(lines) // count][:count]


def _docstring_line_numbers(tree: ast.Module) -> set[int]:
    numbers: set[int] = set()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            text = node.body[0]
            numbers.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return numbers
