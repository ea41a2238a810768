"""The sentencepiece model: trained on the training split, or taken from the user.

A trained model has fairseq's specials at fairseq's places (``<s>`` 0, ``<pad>`` 1, ``</s>`` 2,
``<unk>`` 3), so both frameworks hold the same ids with offset 0. The newline is a piece of its own,
as is the tab where white space is kept: a document of many lines is encoded in one go, and
decoding gives its lines back.

Training is deterministic. sentencepiece would draw its sample at random, so lines are chosen here,
evenly spaced; and the sums of the unigram model depend on the number of threads, so it is fixed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece

from normplugin.data.corpus import Corpus, require_documents
from normplugin.data.settings import TokenizerSettings
from normplugin.errors import DataError

TRAINING_THREADS = 4
SPECIALS = {"bos_id": 0, "pad_id": 1, "eos_id": 2, "unk_id": 3}
# Stands for unknown characters inside sentencepiece's trainer, which drops lines that hold it.
_RESERVED = "\u2585"
_TOO_HIGH = re.compile(r"Vocabulary size too high.*<= (\d+)", re.DOTALL)
_TOO_SMALL = re.compile(r"smaller than required_chars. \d+ vs (\d+)")


@dataclass(frozen=True)
class LineCounts:
    """Lines of the training split: usable, used to train, and those the trainer must skip."""

    usable: int
    used: int
    skipped_too_long: int
    skipped_reserved: int


@dataclass(frozen=True)
class Tokenizer:
    """A loaded model, its bytes, and the lines it was trained on (None for a given one)."""

    processor: sentencepiece.SentencePieceProcessor
    model: bytes
    lines: LineCounts | None


def load(path: Path) -> Tokenizer:
    """Return the user's model; raise `DataError` when it is none, or cannot end a document."""
    try:
        model = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"--tokenizer: got {path}; it cannot be read ({error.strerror}). Check the path."
        ) from None
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError:
        raise DataError(
            f"--tokenizer: got {path}; it is not a sentencepiece model. Name the .model file."
        ) from None
    if processor.eos_id() < 0:
        raise DataError(
            f"--tokenizer: got {path}; it has no eos piece, and every document ends with eos in "
            "both frameworks. Train it with an eos_id of 0 or more."
        )
    return Tokenizer(processor, model, None)


def train(corpus: Corpus, settings: TokenizerSettings) -> Tokenizer:
    """Train a model on the lines of the training split.

    Raises:
        DataError: A split is empty, no line can be used, or the text does not allow
            ``vocab_size`` pieces.
    """
    lines = count_lines(corpus, settings)
    if not lines.usable:
        raise DataError(
            f"tokenizer training: got 0 usable lines; {lines.skipped_too_long} are longer than "
            f"{settings.max_sentence_length} bytes. Raise --max-sentence-length, or add text."
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sample(corpus, settings, lines.usable),
            model_writer=model,
            **_trainer_options(settings),
        )
    except RuntimeError as error:
        raise _training_error(str(error), settings) from None
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return Tokenizer(processor, model.getvalue(), lines)


def count_lines(corpus: Corpus, settings: TokenizerSettings) -> LineCounts:
    """Count the lines of the training split that sentencepiece would use, and skip."""
    usable = too_long = reserved = 0
    splits: set[str] = set()
    for line in _lines(corpus, splits):
        if len(line.encode()) > settings.max_sentence_length:
            too_long += 1
        elif _RESERVED in line:
            reserved += 1
        else:
            usable += 1
    require_documents(splits)
    stride = _stride(usable, settings)
    return LineCounts(usable, -(-usable // stride), too_long, reserved)


def _sample(corpus: Corpus, settings: TokenizerSettings, usable: int) -> Iterator[str]:
    stride = _stride(usable, settings)
    position = 0
    for line in _lines(corpus, set()):
        if len(line.encode()) > settings.max_sentence_length or _RESERVED in line:
            continue
        if position % stride == 0:
            yield line
        position += 1


def _stride(usable: int, settings: TokenizerSettings) -> int:
    return max(1, -(-usable // settings.input_sentence_size))


def _lines(corpus: Corpus, splits: set[str]) -> Iterator[str]:
    """Yield the training split's lines; note on the way which splits have a document."""
    for document in corpus.documents():
        if document.split not in splits and document.text.strip():
            splits.add(document.split)
        if document.split == "train":
            for line in document.text.split("\n"):
                if line.strip():
                    yield line


def _trainer_options(settings: TokenizerSettings) -> dict[str, Any]:
    return {
        "vocab_size": settings.vocab_size,
        "model_type": settings.model_type,
        "byte_fallback": settings.byte_fallback,
        "character_coverage": settings.character_coverage,
        "normalization_rule_name": settings.normalization,
        "add_dummy_prefix": settings.dummy_prefix,
        "remove_extra_whitespaces": not settings.keep_extra_spaces,
        "allow_whitespace_only_pieces": settings.keep_extra_spaces,
        "user_defined_symbols": ["\n", "\t"] if settings.keep_extra_spaces else ["\n"],
        "max_sentence_length": settings.max_sentence_length,
        "hard_vocab_limit": not settings.soft_vocab_limit,
        "num_threads": TRAINING_THREADS,
        "minloglevel": 2,
        **SPECIALS,
    }


def _training_error(message: str, settings: TokenizerSettings) -> DataError:
    got = f"--vocab-size: got {settings.vocab_size}; "
    if found := _TOO_HIGH.search(message):
        return DataError(
            f"{got}this text allows at most {found[1]}. Take --vocab-size {found[1]} or less, "
            "or --soft-vocab-limit to get as many pieces as there are."
        )
    if found := _TOO_SMALL.search(message):
        return DataError(
            f"{got}the specials, bytes and characters of this text need at least {found[1]}. "
            "Raise it, or lower --character-coverage."
        )
    return DataError(f"{got}sentencepiece refused: {message.strip()}. Change the options it names.")
