"""All of ``normplugin prepare``, in order: check, train or take a tokenizer, encode, record."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from normplugin.data import (
    fairseq_format,
    frameworks,
    manifest,
    megatron_format,
    output,
    record,
    tokenizer,
    vocabulary,
)
from normplugin.data.corpus import Corpus, require_documents, text_corpus
from normplugin.data.default_corpus import default_corpus
from normplugin.data.encode import Encoded, Writer, encode
from normplugin.data.labelled import labelled_corpus
from normplugin.data.manifest import Manifest
from normplugin.data.parallel import parallel_corpus
from normplugin.data.record import Identity
from normplugin.data.settings import PrepareSettings, TokenizerSettings
from normplugin.data.tokenizer import Tokenizer
from normplugin.data.vocabulary import Vocabulary
from normplugin.errors import DataError

_Finish = Callable[[Path, Vocabulary, np.ndarray, Corpus], None]
# Framework -> what opens the files of one dataset, and what completes the folder.
_FORMATS: Mapping[str, tuple[Callable[[Path, str, Vocabulary], Writer], _Finish]] = {
    "fairseq": (fairseq_format.FairseqWriter, fairseq_format.finish),
    "megatron": (megatron_format.MegatronWriter, megatron_format.finish),
}


@dataclass(frozen=True)
class Outcome:
    """The record, whether it was there already, and seconds per step."""

    manifest: Manifest
    reused: bool
    seconds: Mapping[str, float]


def prepare(settings: PrepareSettings) -> Outcome:
    """Write the prepared folder, or find it there.

    Raises:
        DataError: Text, settings or folder cannot be used; the folder is as it was.
        MissingFrameworkError: A framework to write for is not installed.
    """
    frameworks.require(settings.frameworks)
    earlier = output.earlier_result(settings.out)
    corpus = _corpus(settings)
    given = _given(settings.tokenizer)
    run = record.identity(settings, given, corpus)
    if earlier is not None and _keep(settings, earlier, run):
        return Outcome(earlier, True, {})
    with output.staged(settings.out) as folder:
        return _write(settings, corpus, given, run, folder)


def _write(
    settings: PrepareSettings,
    corpus: Corpus,
    given: Tokenizer | None,
    run: Identity,
    folder: Path,
) -> Outcome:
    started = time.perf_counter()
    used = given or _train(settings, corpus)
    trained = time.perf_counter()
    (folder / "spm.model").write_bytes(used.model)
    ids = vocabulary.build(used.processor)
    writers = _writers(settings.frameworks, folder, ids, corpus)
    imported = time.perf_counter()
    encoded = _encode(settings, corpus, used, ids, writers)
    for name in settings.frameworks:
        _FORMATS[name][1](folder / name, ids, encoded.id_counts, corpus)
    written = time.perf_counter()
    _check(settings, run, encoded, corpus)
    result = record.build(run, used, ids, encoded, manifest.hashes(folder))
    result.write(folder)
    return Outcome(result, False, {"tokenizer": trained - started, "encoding": written - imported})


def _train(settings: PrepareSettings, corpus: Corpus) -> Tokenizer:
    assert isinstance(settings.tokenizer, TokenizerSettings)
    if not settings.quiet:
        print("training the tokenizer (seconds to minutes, no progress shown)", file=sys.stderr)
    return tokenizer.train(corpus, settings.tokenizer)


def _given(chosen: TokenizerSettings | Path) -> Tokenizer | None:
    if isinstance(chosen, TokenizerSettings):
        return None
    return tokenizer.load(manifest.tokenizer_of(chosen) if chosen.is_dir() else chosen)


def _writers(
    names: Sequence[str], folder: Path, ids: Vocabulary, corpus: Corpus
) -> dict[str, list[Writer]]:
    for name in names:
        (folder / name).mkdir()
    return {
        dataset: [_FORMATS[name][0](folder / name, dataset, ids) for name in names]
        for dataset in corpus.datasets
    }


def _encode(
    settings: PrepareSettings,
    corpus: Corpus,
    used: Tokenizer,
    ids: Vocabulary,
    writers: Mapping[str, Sequence[Writer]],
) -> Encoded:
    total = sum(source.path.stat().st_size for source in corpus.sources)
    # disable=None: no bar where stderr is not a terminal.
    disable = True if settings.quiet else None
    with tqdm(total=total, unit="B", unit_scale=True, desc="encode", disable=disable) as bar:
        return encode(corpus.documents(), used, ids, writers, bar.update)


def _corpus(settings: PrepareSettings) -> Corpus:
    inputs, valid = settings.inputs, settings.valid
    how = settings.valid_fraction, settings.errors
    if settings.kind == "pairs":
        sides = (inputs, settings.targets), (valid, settings.valid_targets)
        return parallel_corpus(*sides, settings.languages, *how)
    if settings.kind in ("classes", "scores"):
        return labelled_corpus(inputs, valid, *how, regression=settings.kind == "scores")
    if not inputs:
        return default_corpus(settings.document)
    return text_corpus(inputs, valid, settings.document, *how)


def _keep(settings: PrepareSettings, earlier: Manifest, run: Identity) -> bool:
    """Return whether to keep the earlier result; raise unless it is the same or replaceable."""
    differing = run.differences(earlier)
    if differing and not settings.overwrite:
        raise DataError(
            f"--out: got {settings.out}; it holds data prepared with other {', '.join(differing)}. "
            "Name a new folder, or pass --overwrite."
        )
    try:
        manifest.verify(settings.out)
    except DataError:
        if not settings.overwrite:
            raise
        return False
    return not differing


def _check(settings: PrepareSettings, run: Identity, encoded: Encoded, corpus: Corpus) -> None:
    found = [name for name, counts in encoded.splits.items() if counts.documents]
    require_documents({corpus.datasets[name] for name in found})
    read = sum(counts.bytes for counts in encoded.splits.values())
    if read != run.corpus["bytes"]:
        raise DataError(
            f"text: got {read} bytes; {run.corpus['bytes']} at the start, so a file changed on "
            "the way. Prepare it again when nothing writes to it."
        )
    for name, counts in encoded.splits.items():
        if counts.unk_rate > settings.max_unk_rate:
            raise DataError(
                f"unknown tokens: got {counts.unk_rate:.2%} of the {name} split; legal is at "
                f"most {settings.max_unk_rate:.2%} (--max-unk-rate). Train the tokenizer with "
                "--byte-fallback or a higher --character-coverage."
            )
