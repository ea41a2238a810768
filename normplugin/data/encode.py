"""The encoding pass: documents in, ids out to every format at once, counts kept.

Documents are encoded in batches of bounded size, so memory does not grow with the corpus (a
document longer than a batch is held alone). Every document ends with eos; none begins with bos.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np

from normplugin.data.corpus import Document
from normplugin.data.tokenizer import Tokenizer
from normplugin.data.vocabulary import Vocabulary

BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 8192


@dataclass
class SplitCounts:
    """What one dataset holds: a split of a text, or of one column of pairs or labelled text.

    Attributes:
        documents: Documents in the data; each has one eos.
        blank_documents: Left out for holding nothing but white space.
        tokens: Ids, the eos of every document included.
        words: White-space separated words of the raw text.
        bytes: Bytes of the raw text: all of it, line ends and blank lines included.
        unknowns: Ids that are the unknown piece.
    """

    documents: int = 0
    blank_documents: int = 0
    tokens: int = 0
    words: int = 0
    bytes: int = 0
    unknowns: int = 0

    @property
    def unk_rate(self) -> float:
        """Share of the tokens that are unknown."""
        return self.unknowns / self.tokens if self.tokens else 0.0

    def predicted(self, eos: bool = True) -> int:
        """Tokens a model is scored on, with or without the eos of every document."""
        return self.tokens if eos else self.tokens - self.documents


class Writer(Protocol):
    """One dataset in one framework's format."""

    def add(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: their sentencepiece ids end to end, and how many each has."""

    def close(self) -> None:
        """Write the index."""


@dataclass
class Encoded:
    """Counts per dataset, and how often each sentencepiece id occurs in the training split."""

    splits: dict[str, SplitCounts]
    id_counts: np.ndarray = field(repr=False)


def encode(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    writers: Mapping[str, Sequence[Writer]],
    progress: Callable[[int], object] = lambda _: None,
) -> Encoded:
    """Encode all documents into the writers of their dataset and close them.

    ``progress`` is called with the raw bytes of every batch.
    """
    result = Encoded({name: SplitCounts() for name in writers}, np.zeros(vocabulary.pieces, int))
    for batch in batches(documents):
        for name in writers:
            part = [document for document in batch if document.dataset == name]
            ids, lengths = _encode_batch(part, tokenizer, vocabulary, result.splits[name])
            if part and part[0].split == "train":
                result.id_counts += np.bincount(ids, minlength=vocabulary.pieces)
            for writer in writers[name] if len(lengths) else ():
                writer.add(ids, lengths)
        progress(sum(document.raw_bytes for document in batch))
    for writer in (writer for name in writers for writer in writers[name]):
        writer.close()
    return result


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents into lists of at most `BATCH_BYTES` and `BATCH_DOCUMENTS`."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        full = size + document.raw_bytes > BATCH_BYTES or len(batch) == BATCH_DOCUMENTS
        if batch and full:
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += document.raw_bytes
    if batch:
        yield batch


def _encode_batch(
    batch: Sequence[Document], tokenizer: Tokenizer, vocabulary: Vocabulary, counts: SplitCounts
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids end to end and their number per document; add to the counts of the split."""
    words = [len(document.text.split()) for document in batch]
    texts = [document.text for document, n in zip(batch, words, strict=True) if n]
    encoded = tokenizer.processor.encode(texts, num_threads=os.cpu_count() or 1) if texts else []
    for document_ids in encoded:
        document_ids.append(vocabulary.eos)
    lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    ids = np.fromiter(chain.from_iterable(encoded), dtype=np.int64, count=int(lengths.sum()))
    counts.documents += len(texts)
    counts.blank_documents += len(batch) - len(texts)
    counts.tokens += len(ids)
    counts.words += sum(words)
    counts.bytes += sum(document.raw_bytes for document in batch)
    counts.unknowns += int((ids == vocabulary.unk).sum())
    return ids, lengths
