"""Everything the user can choose; what a manifest records and compares."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from normplugin.errors import DataError, unknown_value

FRAMEWORKS = ("fairseq", "megatron")
KINDS = ("text", "pairs", "classes", "scores")
DOCUMENTS = ("line", "blank-line", "file")
MODEL_TYPES = ("unigram", "bpe")
NORMALIZATIONS = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity")
ERRORS = ("strict", "replace")


@dataclass(frozen=True)
class TokenizerSettings:
    """How a sentencepiece model is trained.

    Attributes:
        vocab_size: Pieces of the model, specials and byte pieces included.
        model_type: One of `MODEL_TYPES`.
        byte_fallback: Spell characters outside the vocabulary as bytes instead of ``<unk>``.
        character_coverage: Share of the characters that become pieces of their own
            (sentencepiece takes 0.98 to 1).
        normalization: One of `NORMALIZATIONS`.
        dummy_prefix: Begin a text with a space, so that its first word is like any other.
        keep_extra_spaces: Keep runs of spaces, and leading and trailing ones.
        max_sentence_length: Lines of more bytes are left out of the training (not of the data).
        input_sentence_size: Train on at most so many lines, evenly spaced.
        soft_vocab_limit: Take what the text allows when it does not allow vocab_size pieces.
    """

    vocab_size: int = 8000
    model_type: str = "unigram"
    byte_fallback: bool = True
    character_coverage: float = 0.9995
    normalization: str = "nmt_nfkc"
    dummy_prefix: bool = True
    keep_extra_spaces: bool = False
    max_sentence_length: int = 4192
    input_sentence_size: int = 100_000
    soft_vocab_limit: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_sentence_length", "input_sentence_size"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "an integer >= 1")
        coverage = self.character_coverage
        _require("character_coverage", coverage, 0.98 <= coverage <= 1.0, "0.98 to 1")
        _choice("model_type", self.model_type, MODEL_TYPES)
        _choice("normalization", self.normalization, NORMALIZATIONS)


@dataclass(frozen=True)
class PrepareSettings:
    """One run of ``normplugin prepare``.

    Attributes:
        out: Folder to write.
        kind: One of `KINDS`: running text, translation pairs, or text labelled with a class or
            with a number.
        inputs: Text files, source files of pairs, or labelled lines; empty for the default corpus.
        valid: The same for validation; empty to split the inputs.
        targets: Target files of pairs.
        valid_targets: The same for validation.
        languages: Names of the source and the target language of pairs.
        valid_fraction: Share of the documents that is validation, when ``valid`` is empty.
        document: One of `DOCUMENTS`.
        errors: One of `ERRORS`: what undecodable bytes do.
        tokenizer: How to train, or a ``.model`` file to take.
        frameworks: Formats to write, of `FRAMEWORKS`.
        max_unk_rate: Refuse when a split has a larger share of unknown tokens.
        overwrite: Replace an earlier result in ``out``.
        quiet: No progress bar.
    """

    out: Path
    kind: str = "text"
    inputs: tuple[Path, ...] = ()
    valid: tuple[Path, ...] = ()
    targets: tuple[Path, ...] = ()
    valid_targets: tuple[Path, ...] = ()
    languages: tuple[str, str] = ("src", "tgt")
    valid_fraction: float = 0.05
    document: str = "line"
    errors: str = "strict"
    tokenizer: TokenizerSettings | Path = field(default_factory=TokenizerSettings)
    frameworks: tuple[str, ...] = FRAMEWORKS
    max_unk_rate: float = 0.01
    overwrite: bool = False
    quiet: bool = True

    def __post_init__(self) -> None:
        rate, fraction = self.max_unk_rate, self.valid_fraction
        _require("max_unk_rate", rate, 0.0 <= rate <= 1.0, "0 <= value <= 1")
        _require("valid_fraction", fraction, 0.0 < fraction <= 0.5, "0 < value <= 0.5")
        _choice("document", self.document, DOCUMENTS)
        _choice("errors", self.errors, ERRORS)
        for name in self.frameworks or ("",):
            _choice("frameworks", name, FRAMEWORKS if self.kind == "text" else FRAMEWORKS[:1])
        if self.valid and not self.inputs:
            raise DataError(
                f"--valid: got {self.valid[0]} without INPUT; the default corpus has its own "
                "validation split. Name the training text too."
            )

    def record(self) -> dict[str, object]:
        """Return what decides the result besides the text and a given tokenizer's bytes."""
        splits_itself = self.inputs and not self.valid
        tokenizer: object = "given"
        if isinstance(self.tokenizer, TokenizerSettings):
            tokenizer = dataclasses.asdict(self.tokenizer)
        kind: dict[str, object] = {} if self.kind == "text" else {"kind": self.kind}
        if self.kind == "pairs":
            kind["languages"] = list(self.languages)
        return {
            **kind,
            "document": self.document,
            "errors": self.errors,
            "frameworks": sorted(self.frameworks),
            "tokenizer": tokenizer,
            "valid_fraction": self.valid_fraction if splits_itself else None,
        }


def option(name: str) -> str:
    """Return the command-line spelling of a setting."""
    return "--" + name.replace("_", "-")


def _choice(name: str, value: str, values: tuple[str, ...]) -> None:
    if value not in values:
        raise DataError(unknown_value(option(name), value, values))


def _require(name: str, value: object, legal: bool, legal_values: str) -> None:
    if not legal:
        raise DataError(f"{option(name)}: got {value}; legal is {legal_values}. Change it.")
