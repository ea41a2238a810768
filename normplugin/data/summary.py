"""What ``normplugin prepare`` prints at the end: counts, files, and the next commands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from normplugin.data.encode import SplitCounts
from normplugin.data.manifest import Manifest
from normplugin.data.prepare import Outcome

_SHOWN = 20  # classes


def text(outcome: Outcome, out: Path) -> str:
    """Return the summary."""
    record = outcome.manifest
    lines = [f"already prepared: {out}" if outcome.reused else f"prepared: {out}"]
    lines += [f"  {name:<10} {seconds:6.1f} s" for name, seconds in outcome.seconds.items()]
    lines += ["", *_corpus(record), *_counts(record), "", *_vocabulary(record), *_training(record)]
    lines += ["", "files:", *(f"  {name}" for name in (*record.files, "manifest.json"))]
    folder = out.resolve()
    if (folder / "fairseq").is_dir():
        data = f"  fairseq-train {shlex.quote(str(folder / 'fairseq'))} --task"
        lines += ["", "fairseq:", *(f"{data} {task} ..." for task in _tasks(record))]
    if (folder / "megatron").is_dir():
        lines += ["", "Megatron:", *_megatron(folder)]
    return "\n".join(lines)


def _corpus(record: Manifest) -> list[str]:
    corpus, document = record.corpus, record.settings["document"]
    return [
        f"text: {corpus['name']} ({corpus['files']} files, {corpus['bytes']:,} bytes)",
        f"one document is one {document}; {record.documents}",
        *_facts(corpus),
    ]


def _facts(corpus: Mapping[str, object]) -> list[str]:
    """Return what is particular to pairs and to labelled lines."""
    skipped, classes, scores = (corpus.get(key) for key in ("skipped", "classes", "scores"))
    if isinstance(skipped, dict):
        reasons = "".join(f", {count:,} left out for {why}" for why, count in skipped.items())
        return [f"pairs: {corpus['pairs']:,}{reasons}"]
    if isinstance(classes, list):
        rows = [f"{i} {row['label']} ({row['train']:,})" for i, row in enumerate(classes)]
        more = ", ..." if len(rows) > _SHOWN else ""
        return [f"classes (training lines): {', '.join(rows[:_SHOWN])}{more}"]
    return [f"labels: {scores['min']:g} to {scores['max']:g}"] if isinstance(scores, dict) else []


def _counts(record: Manifest) -> list[str]:
    width = max(map(len, record.splits)) + 1
    head = f"{'documents':>11}{'tokens':>13}{'words':>12}{'bytes':>14}{'unknown':>10}"
    rows = [(f"  {name:<{width}}", counts) for name, counts in sorted(record.splits.items())]
    return [f"  {'split':<{width}}{head}", *(_row(name, counts) for name, counts in rows)]


def _row(name: str, counts: SplitCounts) -> str:
    blank = f"  ({counts.blank_documents:,} blank left out)" if counts.blank_documents else ""
    return (
        f"{name}{counts.documents:>11,}{counts.tokens:>13,}{counts.words:>12,}"
        f"{counts.bytes:>14,}{counts.unk_rate:>10.3%}{blank}"
    )


def _vocabulary(record: Manifest) -> list[str]:
    sizes, mask = record.vocabulary, record.ids["mask_piece"]
    mask_row = "masked_lm adds 1" if mask is None else "<mask> included, and matched in the text"
    return [
        f"vocabulary: {record.tokenizer['pieces']:,} pieces; fairseq {sizes['fairseq_rows']:,} rows"
        f" ({mask_row}); Megatron pads to {sizes['megatron_padded']:,} by default",
        f"ids: fairseq id = Megatron id + {record.offset}, but for the specials in manifest.json",
    ]


def _training(record: Manifest) -> list[str]:
    lines = record.tokenizer["lines"]
    if not isinstance(lines, dict):
        return ["tokenizer: given"]
    found = [f"tokenizer: trained on {lines['used']:,} of {lines['usable']:,} lines"]
    if lines["skipped_too_long"]:
        found.append(
            f"  {lines['skipped_too_long']:,} skipped as too long (raise --max-sentence-length to "
            "train on them); they are in the data all the same"
        )
    if lines["skipped_reserved"]:
        found.append(
            f"  {lines['skipped_reserved']:,} skipped for U+2585, which the trainer keeps for "
            "itself; they are in the data all the same"
        )
    return found


def _tasks(record: Manifest) -> list[str]:
    """Return fairseq's tasks for the data, with the options they need."""
    kind, languages = record.settings.get("kind"), record.settings.get("languages")
    if isinstance(languages, list):
        source, target = languages
        return [f"translation --source-lang {source} --target-lang {target} --share-all-embeddings"]
    labelled = "sentence_prediction --criterion sentence_prediction --init-token 0"
    if len(record.splits) > 2:
        labelled += " --separator-token 2"
    if kind == "scores":
        return [f"{labelled} --num-classes 1 --regression-target"]
    classes = record.corpus.get("classes")
    if isinstance(classes, list):
        return [f"{labelled} --num-classes {len(classes)}"]
    return [f"{task} --tokens-per-sample 512" for task in ("language_modeling", "masked_lm")]


def _megatron(folder: Path) -> list[str]:
    def path(*parts: str) -> str:
        return shlex.quote(str(folder.joinpath(*parts)))

    return [
        f"  --train-data-path {path('megatron', 'train_text_document')}",
        f"  --valid-data-path {path('megatron', 'valid_text_document')}",
        f"  --test-data-path {path('megatron', 'valid_text_document')}",
        "  --tokenizer-type SentencePieceTokenizer",
        f"  --tokenizer-model {path('spm.model')}",
    ]
