"""Turn text into training data for fairseq and Megatron, with one encoding pass.

Writes DIR/spm.model, DIR/fairseq (dict.txt and binaries for the tasks language_modeling and
masked_lm), DIR/megatron (train_text_document, valid_text_document) and DIR/manifest.json (settings,
counts, SHA-256 of every file). The ids are the same in both but for a constant offset.

With no INPUT the text is the running Python's standard library (about 11 MB): one document is one
file, and white space is kept. With INPUT one document is one line, and sentencepiece's default
normalisation applies. Every document ends with eos. The options say how to change each of these.

Instead of INPUT, for fairseq alone:

    --source train.de --target train.en      pairs, for the task translation; one joint vocabulary
    --labelled train.tsv --tokenizer DIR     lines of label<TAB>text, for sentence_prediction, in
                                             the vocabulary that DIR was prepared with

DIR is written completely or not at all. The same command again finds the result and ends well.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from normplugin.data import frameworks, inputs
from normplugin.data.settings import (
    DOCUMENTS,
    ERRORS,
    MODEL_TYPES,
    NORMALIZATIONS,
    PrepareSettings,
    TokenizerSettings,
    option,
)
from normplugin.errors import DataError

_DEFAULTS = TokenizerSettings()
# Source code: nothing may be lost. Text: sentencepiece's own defaults.
_DEFAULT_CORPUS = {"normalization": "identity", "keep_extra_spaces": True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``normplugin prepare``."""
    add = parser.add_argument
    add("inputs", nargs="*", type=Path, metavar="INPUT", help="UTF-8 text files")
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    add("--overwrite", action="store_true", help="replace data prepared earlier in DIR")
    add("--quiet", action="store_true", help="no progress bar and no summary")
    names = "fairseq, megatron or fairseq,megatron (default: those installed)"
    add("--frameworks", metavar="NAMES", help=names)
    inputs.add_arguments(parser)
    _add_document_arguments(parser.add_argument_group("documents"))
    # No defaults in these groups: what was given must be told from what was not, see _tokenizer.
    group = parser.add_argument_group("tokenizer")
    given = "take this .model file, or that of a prepared folder"
    group.add_argument("--tokenizer", type=Path, metavar="MODEL", help=given)
    _add_model_arguments(group)
    _add_training_arguments(group)


def _add_document_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--valid", nargs="+", type=Path, default=[], metavar="FILE", help="validation files")
    share = "share of the documents for validation, without --valid (default: 0.05)"
    add("--valid-fraction", type=float, default=0.05, metavar="F", help=share)
    kinds = "what one document is (default: line; without INPUT: file)"
    add("--document", choices=DOCUMENTS, help=kinds)
    errors = "what undecodable bytes do: stop, or become U+FFFD (default: strict)"
    add("--errors", choices=ERRORS, default="strict", help=errors)
    rate = "refuse a larger share of unknown tokens (default: 0.01)"
    add("--max-unk-rate", type=float, default=0.01, metavar="RATE", help=rate)


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    add, flag = group.add_argument, argparse.BooleanOptionalAction
    add("--vocab-size", type=int, metavar="N", help=f"pieces (default: {_DEFAULTS.vocab_size})")
    add("--model-type", choices=MODEL_TYPES, help=f"default: {_DEFAULTS.model_type}")
    add("--byte-fallback", action=flag, help="spell rare characters as bytes (default: yes)")
    rules = f"default: {_DEFAULTS.normalization}; without INPUT: identity"
    add("--normalization", choices=NORMALIZATIONS, help=rules)
    add("--dummy-prefix", action=flag, help="begin texts with a space piece (default: yes)")
    spaces = "keep runs of spaces, and tabs (default: no; without INPUT: yes)"
    add("--keep-extra-spaces", action=flag, help=spaces)


def _add_training_arguments(group: argparse._ArgumentGroup) -> None:
    add, flag = group.add_argument, argparse.BooleanOptionalAction
    coverage = f"share of characters with a piece (default: {_DEFAULTS.character_coverage})"
    add("--character-coverage", type=float, metavar="C", help=coverage)
    longest = (
        "longer lines are left out of tokenizer training, not of the data "
        f"(default: {_DEFAULTS.max_sentence_length})"
    )
    add("--max-sentence-length", type=int, metavar="BYTES", help=longest)
    most = f"train on at most so many, evenly spaced (default: {_DEFAULTS.input_sentence_size})"
    add("--input-sentence-size", type=int, metavar="LINES", help=most)
    add("--soft-vocab-limit", action=flag, help="take fewer pieces if the text has no more")


def run(args: argparse.Namespace) -> int:
    """Prepare the data and print the summary."""
    from normplugin.data import summary
    from normplugin.data.prepare import prepare

    settings = settings_of(args)
    outcome = prepare(settings)
    if not settings.quiet:
        print(summary.text(outcome, settings.out))
    return 0


def settings_of(args: argparse.Namespace) -> PrepareSettings:
    """Return the settings the arguments ask for; raise `DataError` for a clash."""
    files = inputs.named(args)
    return PrepareSettings(
        out=args.out,
        **files,
        valid_fraction=args.valid_fraction,
        document=args.document or ("line" if files["inputs"] else "file"),
        errors=args.errors,
        tokenizer=_tokenizer(args, {} if files["inputs"] else _DEFAULT_CORPUS),
        frameworks=_frameworks(args.frameworks, files["kind"]),
        max_unk_rate=args.max_unk_rate,
        overwrite=args.overwrite,
        quiet=args.quiet,
    )


def _frameworks(names: str | None, kind: str) -> tuple[str, ...]:
    if names:
        return tuple(sorted(set(names.split(","))))
    return frameworks.installed() if kind == "text" else ("fairseq",)


def _tokenizer(args: argparse.Namespace, default: dict[str, Any]) -> TokenizerSettings | Path:
    names = [field.name for field in dataclasses.fields(TokenizerSettings)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.tokenizer is None:
        return TokenizerSettings(**{**default, **given})
    if given:
        name, value = next(iter(given.items()))
        raise DataError(
            f"{option(name)}: got {value} with --tokenizer {args.tokenizer}; it is a choice for "
            "training a tokenizer. Drop one of the two."
        )
    return Path(args.tokenizer)
