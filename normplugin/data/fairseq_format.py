"""fairseq's format: dictionaries and mmap datasets, by fairseq's own builder.

    text       dict.txt, train, valid                       language_modeling, masked_lm
    pairs      dict.de.txt, train.de-en.de, ...             translation
    labelled   input0/dict.txt, input0/train, ..., label/   sentence_prediction

One item is one document, ending in eos; an item of label/ is one label and eos.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from normplugin.data import vocabulary
from normplugin.data.corpus import Corpus
from normplugin.data.frameworks import imported
from normplugin.data.labelled import LabelledCorpus
from normplugin.data.vocabulary import Vocabulary


class FairseqWriter:
    """One dataset; maps sentencepiece ids to fairseq's."""

    def __init__(self, folder: Path, dataset: str, vocabulary: Vocabulary):
        module = imported("fairseq", "fairseq.data.indexed_dataset")
        self._torch = imported("fairseq", "torch")
        self._map = vocabulary.fairseq_ids
        self._index = folder / f"{dataset}.idx"
        self._index.parent.mkdir(exist_ok=True)
        self._builder = module.MMapIndexedDatasetBuilder(
            str(folder / f"{dataset}.bin"),
            dtype=module.best_fitting_int_dtype(vocabulary.fairseq_rows),
        )

    def add(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: their sentencepiece ids end to end, and how many each has."""
        for item in self._torch.from_numpy(self._map[ids]).split(lengths.tolist()):
            self._builder.add_item(item)

    def close(self) -> None:
        """Write the index."""
        self._builder.finalize(str(self._index))


def finish(folder: Path, ids: Vocabulary, id_counts: np.ndarray, corpus: Corpus) -> None:
    """Write the dictionaries, with the counts of the training split, and the labels."""
    text = ids.dict_text(id_counts)
    for name in corpus.dictionaries:
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    if isinstance(corpus, LabelledCorpus):
        (folder / "label").mkdir()
        (_write_classes if corpus.classes else _write_scores)(folder / "label", corpus)


def _write_classes(folder: Path, corpus: LabelledCorpus) -> None:
    ids = vocabulary.of_words(corpus.classes)
    numbers = {label: i for i, label in enumerate(ids.symbols, start=len(ids.specials))}
    for split, labels in corpus.labels.items():
        items = np.array([[numbers[label], ids.eos] for label in labels])
        writer = FairseqWriter(folder, split, ids)
        writer.add(items.ravel(), np.full(len(items), 2))
        writer.close()
        if split == "train":
            counts = np.bincount(items.ravel(), minlength=ids.pieces)
            (folder / "dict.txt").write_text(ids.dict_text(counts), encoding="utf-8", newline="\n")


def _write_scores(folder: Path, corpus: LabelledCorpus) -> None:
    """Write the text files that fairseq reads for ``--regression-target``."""
    for split, labels in corpus.labels.items():
        text = "".join(f"{label.strip()}\n" for label in labels)
        (folder / f"{split}.label").write_text(text, encoding="utf-8", newline="\n")
