"""What a document is, and which split it belongs to; text is streamed, never held.

A corpus is a list of files. Per file, a document is

    line         one line without its line end (the default for text the user gives)
    blank-line   lines up to a blank one
    file         the whole file, line ends included (the default for the default corpus)

Documents of nothing but white space are left out of the data and counted. Every byte of the files
is counted for some document, so the counts of a split add up to the size of its text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from normplugin.errors import DataError

SPLITS = ("train", "valid")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Source:
    """One text file; ``split`` is None where its documents are split one by one."""

    name: str
    path: Path
    split: str | None

    def lines(self, errors: str) -> Iterator[tuple[str, int]]:
        """Yield (text without its line end, raw bytes) of each line."""
        return _cut_lines(_lines(self.path, errors))


@dataclass  # not frozen: there are millions, and frozen ones take twice as long to make
class Document:
    """Text to encode, and the raw bytes it and its separators take in the file.

    ``dataset`` is where it goes: the path of the dataset in the framework's folder, without suffix.
    """

    split: str
    dataset: str
    text: str
    raw_bytes: int


def require_documents(splits: Collection[str]) -> None:
    """Raise `DataError` unless each split is among those that have a document."""
    for split in SPLITS:
        if split not in splits:
            raise DataError(
                f"{split} split: got 0 documents; each split needs at least 1 that is not blank. "
                "Add text, give validation files, or cut text finer with --document line."
            )


@dataclass(frozen=True)
class Fingerprint:
    """What was read: file count, bytes, and a SHA-256 over names, splits and contents."""

    name: str
    files: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """A list of files and the rule that cuts them into documents.

    Attributes:
        name: How records call it.
        sources: Files, in reading order.
        document: One of `settings.DOCUMENTS`.
        valid_fraction: Every round(1 / fraction)-th document is validation, from the first on,
            where the source has no split of its own.
        errors: ``strict`` or ``replace``.
    """

    name: str
    sources: tuple[Source, ...]
    document: str
    valid_fraction: float
    errors: str = "strict"

    @property
    def datasets(self) -> dict[str, str]:
        """Dataset -> split, of all datasets that documents go to."""
        return {split: split for split in SPLITS}

    @property
    def dictionaries(self) -> tuple[str, ...]:
        """Paths of fairseq's dictionary in its folder; fairseq wants it more than once."""
        return ("dict.txt",)

    @property
    def facts(self) -> dict[str, object]:
        """What a record says about the text beside the fingerprint."""
        return {}

    def documents(self) -> Iterator[Document]:
        """Yield every document, in order, the blank ones included."""
        position = 0
        for source in self.sources:
            for text, raw_bytes in _CUT[self.document](_lines(source.path, self.errors)):
                split = self.split(source, position)
                position += bool(text.strip())
                yield Document(split, split, text, raw_bytes)

    def split(self, source: Source, position: int) -> str:
        """Return the split of the document at a position, counted without blank ones."""
        if source.split is not None:
            return source.split
        return "train" if position % round(1.0 / self.valid_fraction) else "valid"

    def fingerprint(self) -> Fingerprint:
        """Read every file once and return what identifies the corpus."""
        digest, size = hashlib.sha256(), 0
        for source in self.sources:
            inner = hashlib.sha256()
            with source.path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    inner.update(chunk)
                    size += len(chunk)
            digest.update(f"{source.name}\0{source.split}\0{inner.hexdigest()}\n".encode())
        return Fingerprint(self.name, len(self.sources), size, digest.hexdigest())


def text_corpus(
    inputs: tuple[Path, ...],
    valid: tuple[Path, ...],
    document: str,
    valid_fraction: float,
    errors: str,
) -> Corpus:
    """Return the corpus of the user's files; raise `DataError` for one that cannot be read."""
    files = sources("INPUT", inputs, "--valid", valid)
    return Corpus(names(files), files, document, valid_fraction, errors)


def sources(
    what: str, inputs: tuple[Path, ...], what_valid: str, valid: tuple[Path, ...]
) -> tuple[Source, ...]:
    """Return the files of two options; raise `DataError` for one that cannot be read."""
    split = "train" if valid else None
    found = [_source(what, path, split) for path in inputs]
    return (*found, *(_source(what_valid, path, "valid") for path in valid))


def names(files: tuple[Source, ...]) -> str:
    """Return the names of files, as a record has them."""
    return ", ".join(source.name for source in files)


def _source(what: str, path: Path, split: str | None) -> Source:
    if not path.exists():
        raise DataError(f"{what}: got {path}; there is no such file. Check the path.")
    if not path.is_file():
        raise DataError(
            f"{what}: got {path}; legal is a file of UTF-8 text, which is read more than once. "
            "Name the files of a folder one by one (a shell pattern does), and save a pipe first."
        )
    if path.stat().st_size == 0:
        raise DataError(f"{what}: got {path}; the file is empty. Leave it out, or fill it.")
    return Source(path.name, path, split)


def _lines(path: Path, errors: str) -> Iterator[tuple[str, int]]:
    """Yield (text with its line end, raw bytes) of each line."""
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield raw.decode("utf-8", errors), len(raw)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: got byte 0x{raw[error.start]:02x} at offset "
                    f"{offset + error.start}; legal is UTF-8. Convert the file, "
                    "or pass --errors replace to read such bytes as U+FFFD."
                ) from None
            offset += len(raw)


def _cut_lines(lines: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    for text, size in lines:
        yield _without_line_end(text), size


def _cut_blank_lines(lines: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    held: list[str] = []
    held_bytes = 0
    for text, size in lines:
        held_bytes += size
        if text.strip():
            held.append(text)
        elif held:
            yield _without_line_end("".join(held)), held_bytes
            held, held_bytes = [], 0
    if held_bytes:
        yield _without_line_end("".join(held)), held_bytes


def _cut_files(lines: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    texts, size = [], 0
    for text, line_bytes in lines:
        texts.append(text)
        size += line_bytes
    yield "".join(texts), size


def _without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


_CUT = {"line": _cut_lines, "blank-line": _cut_blank_lines, "file": _cut_files}
