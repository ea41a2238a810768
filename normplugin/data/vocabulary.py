"""Ids in both frameworks, and fairseq's ``dict.txt``.

Megatron uses sentencepiece's own ids. fairseq's dictionary begins with ``<s>`` 0, ``<pad>`` 1,
``</s>`` 2, ``<unk>`` 3 and appends the rows of ``dict.txt``. The rule, for any sentencepiece model:

    fairseq id = fairseq's own place       for the model's bos, pad, eos and unknown piece
               = sentencepiece id + offset for every other piece

The offset is 4 minus the number of specials at the start of the model: 0 for models trained here,
1 for sentencepiece's defaults. A special further up keeps an unused row: the offset is constant.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import sentencepiece

FAIRSEQ_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
MASK = "<mask>"  # appended, or found, by fairseq's masked_lm task
# Megatron's default for --make-vocab-size-divisible-by, times a tensor-parallel size of 1.
MEGATRON_DIVISOR = 128


@dataclass(frozen=True)
class Vocabulary:
    """The id map of one sentencepiece model.

    Attributes:
        pieces: Size of the model, and Megatron's unpadded vocabulary.
        eos: sentencepiece's id of the piece that ends a document.
        unk: sentencepiece's id of the unknown piece.
        offset: fairseq id minus sentencepiece id of every text piece.
        specials: sentencepiece id -> fairseq id of the specials.
        symbols: Rows of ``dict.txt``.
        fairseq_ids: fairseq id of every sentencepiece id.
    """

    pieces: int
    eos: int
    unk: int
    offset: int
    specials: dict[int, int]
    symbols: tuple[str, ...]
    fairseq_ids: np.ndarray

    @property
    def fairseq_rows(self) -> int:
        """Size of fairseq's dictionary (masked_lm adds a mask row unless there is one)."""
        return len(FAIRSEQ_SPECIALS) + len(self.symbols)

    @property
    def megatron_padded(self) -> int:
        """Size Megatron pads to by default, without tensor parallelism."""
        return -(-self.pieces // MEGATRON_DIVISOR) * MEGATRON_DIVISOR

    def dict_text(self, counts: np.ndarray) -> str:
        """Return ``dict.txt``; ``counts`` are per sentencepiece id, of the training split."""
        first = self.pieces - len(self.symbols)
        return "".join(
            f"{symbol} {0 if first + row in self.specials else int(counts[first + row])}\n"
            for row, symbol in enumerate(self.symbols)
        )


def build(processor: sentencepiece.SentencePieceProcessor) -> Vocabulary:
    """Return the id map of a model."""
    pieces = processor.get_piece_size()
    specials = _specials(processor)
    first = next((i for i in range(pieces) if i not in specials), pieces)
    offset = len(FAIRSEQ_SPECIALS) - first
    fairseq_ids = np.arange(pieces, dtype=np.int64) + offset
    for piece_id, fairseq_id in specials.items():
        fairseq_ids[piece_id] = fairseq_id
    return Vocabulary(
        pieces=pieces,
        eos=processor.eos_id(),
        unk=processor.unk_id(),
        offset=offset,
        specials=specials,
        symbols=_symbols([processor.id_to_piece(i) for i in range(pieces)], first, specials),
        fairseq_ids=fairseq_ids,
    )


def of_words(words: Sequence[str]) -> Vocabulary:
    """Return the id map of a closed list of words, as if a model had fairseq's specials and them.

    Word i has id i + 4.
    """
    specials = {i: i for i in range(len(FAIRSEQ_SPECIALS))}
    pieces = len(specials) + len(words)
    return Vocabulary(pieces, 2, 3, 0, specials, tuple(words), np.arange(pieces, dtype=np.int64))


def _specials(processor: sentencepiece.SentencePieceProcessor) -> dict[int, int]:
    """Map the model's specials, and control pieces called like fairseq's, to fairseq's ids."""
    ids = (processor.bos_id(), processor.pad_id(), processor.eos_id(), processor.unk_id())
    specials = {i: fairseq_id for fairseq_id, i in enumerate(ids) if i >= 0}
    for fairseq_id, word in enumerate(FAIRSEQ_SPECIALS):
        piece_id = processor.piece_to_id(word)
        if processor.is_control(piece_id) and piece_id not in specials:
            specials[piece_id] = fairseq_id
    return specials


def _symbols(pieces: Sequence[str], first: int, specials: dict[int, int]) -> tuple[str, ...]:
    """Name every row: the piece itself wherever ``dict.txt`` can hold it, and hold it once."""
    taken = set(FAIRSEQ_SPECIALS) | set(pieces)
    symbols: list[str] = []
    for piece_id in range(first, len(pieces)):
        symbol = _symbol(piece_id, pieces[piece_id], piece_id in specials)
        while symbol != pieces[piece_id] and symbol in taken:
            symbol = f"<{symbol}>"
        taken.add(symbol)
        symbols.append(symbol)
    return tuple(symbols)


def _symbol(piece_id: int, piece: str, special: bool) -> str:
    if special:
        return f"<unused:{piece_id}>"
    # A user-defined piece called <s> is text: it must not become fairseq's control symbol.
    if piece in FAIRSEQ_SPECIALS:
        return f"<piece:{piece_id}>"
    # fairseq splits dict.txt, and what it prints, at white space.
    return re.sub(r"\s", lambda found: f"<U+{ord(found[0]):04X}>", piece)
