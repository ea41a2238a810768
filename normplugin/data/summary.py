"""What ``normplugin prepare`` prints at the end: counts, files, and the next commands."""

from __future__ import annotations

import shlex
from pathlib import Path

from normplugin.data.encode import SplitCounts
from normplugin.data.manifest import Manifest
from normplugin.data.prepare import Outcome


def text(outcome: Outcome, out: Path) -> str:
    """Return the summary."""
    record = outcome.manifest
    lines = [f"already prepared: {out}" if outcome.reused else f"prepared: {out}"]
    lines += [f"  {name:<10} {seconds:6.1f} s" for name, seconds in outcome.seconds.items()]
    lines += ["", *_corpus(record), *_counts(record), "", *_vocabulary(record), *_training(record)]
    lines += ["", "files:", *(f"  {name}" for name in (*record.files, "manifest.json"))]
    folder = out.resolve()
    if (folder / "fairseq").is_dir():
        lines += ["", "fairseq:", *_fairseq(folder)]
    if (folder / "megatron").is_dir():
        lines += ["", "Megatron:", *_megatron(folder)]
    return "\n".join(lines)


def _corpus(record: Manifest) -> list[str]:
    corpus, document = record.corpus, record.settings["document"]
    return [
        f"text: {corpus['name']} ({corpus['files']} files, {corpus['bytes']:,} bytes)",
        f"one document is one {document}; {record.documents}",
    ]


def _counts(record: Manifest) -> list[str]:
    head = f"  {'split':<6}{'documents':>11}{'tokens':>13}{'words':>12}{'bytes':>14}{'unknown':>10}"
    return [head, *(_row(split, counts) for split, counts in sorted(record.splits.items()))]


def _row(split: str, counts: SplitCounts) -> str:
    blank = f"  ({counts.blank_documents:,} blank left out)" if counts.blank_documents else ""
    return (
        f"  {split:<6}{counts.documents:>11,}{counts.tokens:>13,}{counts.words:>12,}"
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


def _fairseq(folder: Path) -> list[str]:
    data = shlex.quote(str(folder / "fairseq"))
    return [
        f"  fairseq-train {data} --task language_modeling --tokens-per-sample 512 ...",
        f"  fairseq-train {data} --task masked_lm --tokens-per-sample 512 ...",
    ]


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
