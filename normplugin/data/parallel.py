"""Parallel text: line i of a source file translates to line i of its target file.

A pair with a blank side is left out on both, and counted by reason. All source lines of a file come
before its target lines, so that a tokenizer trained on evenly spaced lines sees both languages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from normplugin.data.corpus import SPLITS, Corpus, Document, Source, names, sources
from normplugin.errors import DataError

_REASONS = {(0, 0): "both empty", (0, 1): "source empty", (1, 0): "target empty"}


@dataclass(frozen=True, kw_only=True)
class ParallelCorpus(Corpus):
    """Files of two languages; ``sources`` has all of the first, then all of the second.

    Attributes:
        languages: Names of the source and the target language.
        kept: Per file pair, one byte per line: whether the pair is in the data.
        skipped: Reason -> pairs left out.
    """

    languages: tuple[str, str]
    kept: tuple[bytes, ...] = field(repr=False)
    skipped: dict[str, int]

    @property
    def datasets(self) -> dict[str, str]:
        """Dataset -> split: fairseq's names for the task translation."""
        return {
            self._dataset(split, language): split for split in SPLITS for language in self.languages
        }

    @property
    def dictionaries(self) -> tuple[str, ...]:
        """One dictionary per language, both the same."""
        return tuple(f"dict.{language}.txt" for language in self.languages)

    @property
    def facts(self) -> dict[str, object]:
        """What a record says beside the fingerprint: pairs, and those left out by reason."""
        return {"pairs": sum(map(sum, self.kept)), "skipped": self.skipped}

    def documents(self) -> Iterator[Document]:
        """Yield every line, those left out as empty documents."""
        start = 0
        for pair, kept in zip(_pairs(self.sources), self.kept, strict=True):
            for side, language in zip(pair, self.languages, strict=True):
                position = start
                for (text, raw_bytes), keep in zip(side.lines(self.errors), kept, strict=False):
                    split = self.split(side, position)
                    position += keep
                    dataset = self._dataset(split, language)
                    yield Document(split, dataset, text if keep else "", raw_bytes)
            start += sum(kept)

    def _dataset(self, split: str, language: str) -> str:
        return f"{split}.{'-'.join(self.languages)}.{language}"


def parallel_corpus(
    inputs: tuple[tuple[Path, ...], tuple[Path, ...]],
    valid: tuple[tuple[Path, ...], tuple[Path, ...]],
    languages: tuple[str, str],
    valid_fraction: float,
    errors: str,
) -> ParallelCorpus:
    """Return the corpus of (source files, target files).

    Raises:
        DataError: A file cannot be read, or the two sides have not the same files and lines.
    """
    files: tuple[Source, ...] = ()
    for side, name in enumerate(("source", "target")):
        files += sources(f"--{name}", inputs[side], f"--valid-{name}", valid[side])
    for option, (left, right) in (("--target", inputs), ("--valid-target", valid)):
        _require_equal(option, len(right), len(left), "files")
    found = [_blank_or_not(pair, errors) for pair in _pairs(files)]
    reasons = sum((Counter(zip(*pair, strict=True)) for pair in found), Counter[tuple[int, int]]())
    return ParallelCorpus(
        names(files),
        files,
        "line",
        valid_fraction,
        errors,
        languages=languages,
        kept=tuple(bytes(map(min, *pair)) for pair in found),
        skipped={text: reasons[reason] for reason, text in _REASONS.items() if reasons[reason]},
    )


def languages(
    inputs: Sequence[Path], targets: Sequence[Path], given: tuple[str | None, str | None]
) -> tuple[str, str]:
    """Return the names of the languages: as given, by the files' suffixes, or src and tgt.

    Raises:
        DataError: A name that fairseq cannot read back from a file name, or one for both.
    """
    found = [_common_suffix(inputs), _common_suffix(targets)]
    found = ["", ""] if found[0] == found[1] else found
    source, target = given[0] or found[0] or "src", given[1] or found[1] or "tgt"
    for option, name in (("--source-lang", source), ("--target-lang", target)):
        if not re.fullmatch(r"[A-Za-z0-9_]+", name):
            raise DataError(
                f"{option}: got {name!r}; legal are letters, digits and _, which is what fairseq "
                f"finds in file names. Give another name with {option}."
            )
    if source == target:
        raise DataError(
            f"--target-lang: got {target} for both languages; fairseq tells them apart by name. "
            "Give two names."
        )
    return source, target


def _common_suffix(paths: Sequence[Path]) -> str:
    suffixes = {path.suffix.removeprefix(".") for path in paths}
    return suffixes.pop() if len(suffixes) == 1 else ""


def _pairs(files: Sequence[Source]) -> Iterator[tuple[Source, Source]]:
    half = len(files) // 2
    return zip(files[:half], files[half:], strict=True)


def _blank_or_not(pair: tuple[Source, Source], errors: str) -> tuple[bytes, bytes]:
    """Return one byte per line of either file: 0 for a blank one."""
    source, target = (bytes(bool(text.strip()) for text, _ in side.lines(errors)) for side in pair)
    _require_equal(str(pair[1].path), len(target), len(source), f"lines in {pair[0].path}")
    return source, target


def _require_equal(what: str, got: int, needed: int, unit: str) -> None:
    if got != needed:
        raise DataError(
            f"{what}: got {got}, and {needed} {unit}; line i of a source file translates to line i "
            "of its target file. Give as many of either."
        )
