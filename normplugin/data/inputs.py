"""Which files the user names, and so which kind of data: text, pairs, or labelled lines."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from normplugin.data.parallel import languages
from normplugin.data.settings import option
from normplugin.errors import DataError

# Option -> the option it needs, and why.
_NEEDS = (
    ("source", "target", "pairs have two sides"),
    ("target", "source", "pairs have two sides"),
    ("valid_source", "source", "these are the validation files of pairs"),
    ("valid_source", "valid_target", "pairs have two sides"),
    ("valid_target", "valid_source", "pairs have two sides"),
    ("source_lang", "source", "it names the language of the source files"),
    ("target_lang", "source", "it names the language of the target files"),
    ("labelled", "tokenizer", "the vocabulary must be the pre-trained model's"),
    ("regression", "labelled", "it says what the labels are"),
)
# Options that exclude each other, and why.
_CLASHES = (
    ("source", "inputs", "a folder holds pairs or running text"),
    ("labelled", "inputs", "a folder holds labelled lines or running text"),
    ("source", "labelled", "a folder holds pairs or labelled lines"),
    ("source", "valid", "pairs take --valid-source and --valid-target"),
    ("source", "document", "a document of pairs is a line"),
    ("labelled", "document", "a document of labelled text is a line"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name files other than INPUT and its validation text."""
    add = parser.add_argument_group("translation pairs, instead of INPUT").add_argument
    files: dict[str, Any] = {"nargs": "+", "type": Path, "default": [], "metavar": "FILE"}
    add("--source", **files, help="text; its line i translates to line i of --target")
    add("--target", **files, help="as many files, of as many lines")
    add("--valid-source", **files, help="the same for validation")
    add("--valid-target", **files, help="the same for validation")
    name = "its name in fairseq (default: the files' suffix, or"
    add("--source-lang", metavar="LANG", help=f"{name} src)")
    add("--target-lang", metavar="LANG", help=f"{name} tgt)")
    add = parser.add_argument_group("classification, instead of INPUT").add_argument
    lines = "lines of label<TAB>text or label<TAB>text<TAB>text; needs --tokenizer"
    add("--labelled", **files, help=lines)
    add("--regression", action="store_true", help="labels are numbers to predict")


def named(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the files say about the settings; raise `DataError` for what does not go."""
    for name, needed, why in _NEEDS:
        if getattr(args, name) and not getattr(args, needed):
            raise DataError(
                f"{option(name)}: got {_shown(args, name)} without {option(needed)}; {why}. "
                f"Give {option(needed)} too."
            )
    for name, other, why in _CLASHES:
        if getattr(args, name) and getattr(args, other):
            raise DataError(
                f"{option(name)}: got {_shown(args, name)} with {_option(other)} "
                f"{_shown(args, other)}; {why}. Drop one of the two."
            )
    found = {"kind": _kind(args), "inputs": tuple(args.source or args.labelled or args.inputs)}
    found["valid"] = tuple(args.valid_source or args.valid)
    if args.source:
        found["targets"], found["valid_targets"] = tuple(args.target), tuple(args.valid_target)
        names = args.source_lang, args.target_lang
        found["languages"] = languages(args.source, args.target, names)
    return found


def _kind(args: argparse.Namespace) -> str:
    if args.source:
        return "pairs"
    if args.labelled:
        return "scores" if args.regression else "classes"
    return "text"


def _option(name: str) -> str:
    return "INPUT" if name == "inputs" else option(name)


def _shown(args: argparse.Namespace, name: str) -> object:
    value = getattr(args, name)
    return value[0] if isinstance(value, list) else value
