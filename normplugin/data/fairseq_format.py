"""fairseq's format: ``dict.txt`` and one mmap dataset per split, by fairseq's own builder.

Read by the tasks ``language_modeling`` and ``masked_lm``. One item is one document, ending in eos.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from normplugin.data.frameworks import imported
from normplugin.data.vocabulary import Vocabulary


class FairseqWriter:
    """One split; maps sentencepiece ids to fairseq's."""

    def __init__(self, folder: Path, split: str, vocabulary: Vocabulary):
        module = imported("fairseq", "fairseq.data.indexed_dataset")
        self._torch = imported("fairseq", "torch")
        self._map = vocabulary.fairseq_ids
        self._index = folder / f"{split}.idx"
        self._builder = module.MMapIndexedDatasetBuilder(
            str(folder / f"{split}.bin"),
            dtype=module.best_fitting_int_dtype(vocabulary.fairseq_rows),
        )

    def add(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: their sentencepiece ids end to end, and how many each has."""
        for item in self._torch.from_numpy(self._map[ids]).split(lengths.tolist()):
            self._builder.add_item(item)

    def close(self) -> None:
        """Write the index."""
        self._builder.finalize(str(self._index))


def finish(folder: Path, vocabulary: Vocabulary, id_counts: np.ndarray) -> None:
    """Write ``dict.txt``, with the counts of the training split."""
    text = vocabulary.dict_text(id_counts)
    (folder / "dict.txt").write_text(text, encoding="utf-8", newline="\n")
