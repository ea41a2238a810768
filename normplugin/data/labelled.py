"""Labelled text for classification and regression: a label, a tab, and a text or two.

    label<TAB>text
    label<TAB>text<TAB>text

The format is strict: every line has all its fields and none is empty, so line numbers of the files
are item numbers of the data, but for the split. The vocabulary is a pre-trained model's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from normplugin.data.corpus import SPLITS, Corpus, Document, names, require_documents, sources
from normplugin.data.vocabulary import FAIRSEQ_SPECIALS, MASK
from normplugin.errors import DataError, unknown_value

_SHOWN = 20  # legal labels in a message
_LEGAL = "label<TAB>text, or label<TAB>text<TAB>text"


@dataclass(frozen=True, kw_only=True)
class LabelledCorpus(Corpus):
    """Lines with a label and one or two texts.

    Attributes:
        columns: Texts per line.
        classes: The labels of the training split in the order of their class numbers; empty for
            regression.
        labels: Split -> label of every line.
    """

    columns: int = 1
    classes: tuple[str, ...] = ()
    labels: dict[str, list[str]] = field(repr=False, default_factory=dict)

    @property
    def datasets(self) -> dict[str, str]:
        """Dataset -> split: fairseq's names for the task sentence_prediction."""
        return {f"input{i}/{split}": split for split in SPLITS for i in range(self.columns)}

    @property
    def dictionaries(self) -> tuple[str, ...]:
        """One dictionary per text column, all the same."""
        return tuple(f"input{i}/dict.txt" for i in range(self.columns))

    @property
    def facts(self) -> dict[str, object]:
        """What a record says beside the fingerprint: lines per class, or the range of scores."""
        if self.classes:
            counts = {split: Counter(labels) for split, labels in self.labels.items()}
            return {
                "classes": [{"label": c, **{s: counts[s][c] for s in SPLITS}} for c in self.classes]
            }
        scores = [float(label) for labels in self.labels.values() for label in labels]
        return {"scores": {"min": min(scores), "max": max(scores)}}

    def documents(self) -> Iterator[Document]:
        """Yield the texts of every line; the first has the bytes of the label and the tabs too."""
        for _, split, (_, first, *others), raw_bytes in self.rows():
            size = sum(len(text.encode()) for text in others)
            yield Document(split, f"input0/{split}", first, raw_bytes - size)
            for i, text in enumerate(others, start=1):
                yield Document(split, f"input{i}/{split}", text, len(text.encode()))

    def rows(self) -> Iterator[tuple[str, str, list[str], int]]:
        """Yield (where it is, split, fields, raw bytes) of every line."""
        position = 0
        for source in self.sources:
            for number, (line, raw_bytes) in enumerate(source.lines(self.errors), start=1):
                where = f"{source.path}, line {number}"
                yield where, self.split(source, position), line.split("\t"), raw_bytes
                position += 1


def labelled_corpus(
    inputs: tuple[Path, ...],
    valid: tuple[Path, ...],
    valid_fraction: float,
    errors: str,
    regression: bool,
) -> LabelledCorpus:
    """Return the corpus of the user's files; raise `DataError` for a file or line of no use."""
    files = sources("--labelled", inputs, "--valid", valid)
    corpus = LabelledCorpus(names(files), files, "line", valid_fraction, errors)
    labels: dict[str, list[str]] = {split: [] for split in SPLITS}
    first: dict[str, str] = {}  # label -> where it is first
    fields = 0
    for where, split, row, _ in corpus.rows():
        fields = fields or len(row)
        _check_fields(where, row, fields)
        (_check_score if regression else _check_class)(where, row[0])
        first.setdefault(row[0], where)
        labels[split].append(row[0])
    require_documents([split for split in SPLITS if labels[split]])
    classes = () if regression else _classes(set(labels["train"]), first)
    return replace(corpus, columns=fields - 1, classes=classes, labels=labels)


def _classes(trained: set[str], first: dict[str, str]) -> tuple[str, ...]:
    """Return the labels of the training split by class number: numbers by value, words by letter.

    Raises:
        DataError: A label that only the validation split has.
    """
    classes = sorted(trained, key=int if all(map(str.isdecimal, trained)) else None)
    for label, where in first.items():
        if label not in trained:
            listing = "" if len(classes) <= _SHOWN else f"{len(classes)} others"
            raise DataError(
                f"{unknown_value(f'{where}, label', label, classes, listing)} Those are in the "
                "training split: add lines with this one too, or pass --regression for numbers."
            )
    return tuple(classes)


def _check_fields(where: str, row: list[str], fields: int) -> None:
    if len(row) not in (2, 3) or len(row) != fields:
        legal = _LEGAL if len(row) == fields else f"{fields} as in the first line"
        raise DataError(
            f"{where}: got {len(row)} fields; legal is {legal}. Separate the fields by tabs, and "
            "give every line the same."
        )
    for name, value in zip(("label", "text", "second text"), row, strict=False):
        if not value.strip():
            raise DataError(
                f"{where}: got an empty {name}; legal is {_LEGAL}. Fill it, or leave the line out."
            )


def _check_class(where: str, label: str) -> None:
    if label.split() != [label] or label in (*FAIRSEQ_SPECIALS, MASK):
        raise DataError(
            f"{where}: got label {label!r}; legal is one word, and none of fairseq's own symbols. "
            "Write it as one, or pass --regression if labels are numbers to predict."
        )


def _check_score(where: str, label: str) -> None:
    try:
        legal = math.isfinite(float(label))
    except ValueError:
        legal = False
    if not legal:
        raise DataError(
            f"{where}: got label {label!r}; legal with --regression is a finite number. Correct "
            "it, or leave --regression out to classify."
        )
