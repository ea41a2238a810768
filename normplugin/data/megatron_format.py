"""Megatron's format: one ``IndexedDataset`` per split, by Megatron's own builder.

The ids are sentencepiece's, as its ``SentencePieceTokenizer`` has them; its eod is the model's eos.
One sequence is one document, ending in eod (as ``preprocess_data.py --append-eod`` does it).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from normplugin.data.corpus import Corpus
from normplugin.data.frameworks import imported
from normplugin.data.vocabulary import Vocabulary


class MegatronWriter:
    """One split; the files are called as Megatron's own ``preprocess_data.py`` calls them."""

    def __init__(self, folder: Path, split: str, vocabulary: Vocabulary):
        module = imported("megatron", "megatron.core.datasets.indexed_dataset")
        prefix = str(folder / f"{split}_text_document")
        self._index = module.get_idx_path(prefix)
        self._builder = module.IndexedDatasetBuilder(
            module.get_bin_path(prefix), dtype=module.DType.optimal_dtype(vocabulary.pieces)
        )

    def add(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: their sentencepiece ids end to end, and how many each has."""
        start = 0
        for length in lengths.tolist():
            self._builder.add_document(ids[start : start + length], [length])
            start += length

    def close(self) -> None:
        """Write the index."""
        self._builder.finalize(self._index)


def finish(folder: Path, ids: Vocabulary, id_counts: np.ndarray, corpus: Corpus) -> None:
    """Write nothing more: Megatron reads the sentencepiece model itself."""
