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
from collections.abc import Iterator, Mapping
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


@dataclass  # not frozen: there are millions, and frozen ones take twice as long to make
class Document:
    """Text to encode, and the raw bytes it and its separators take in the file."""

    split: str
    text: str
    raw_bytes: int


def require_documents(documents: Mapping[str, int]) -> None:
    """Raise `DataError` unless each split has a document that is not blank."""
    for split in SPLITS:
        if not documents.get(split):
            raise DataError(
                f"{split} split: got 0 documents; each split needs at least 1 that is not blank. "
                "Add text, give --valid FILE, or cut it finer with --document line."
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

    def documents(self) -> Iterator[Document]:
        """Yield every document, in order, the blank ones included."""
        stride = round(1.0 / self.valid_fraction)
        position = 0
        for source in self.sources:
            for text, raw_bytes in _CUT[self.document](_lines(source.path, self.errors)):
                split = source.split
                if split is None:
                    split = "valid" if position % stride == 0 else "train"
                position += bool(text.strip())
                yield Document(split, text, raw_bytes)

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
    sources = [_source(path, "train" if valid else None) for path in inputs]
    sources += [_source(path, "valid") for path in valid]
    name = ", ".join(source.name for source in sources)
    return Corpus(name, tuple(sources), document, valid_fraction, errors)


def _source(path: Path, split: str | None) -> Source:
    what = "--valid" if split == "valid" else "INPUT"
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
