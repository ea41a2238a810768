"""``manifest.json``: what a prepared folder holds, and whether it still does.

It has no time and no path in it, so two runs on the same text write the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from normplugin.data.encode import SplitCounts
from normplugin.errors import DataError

NAME = "manifest.json"
FORMAT = 1
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """The record of one prepared folder.

    Attributes:
        format: Version of this record.
        versions: normplugin's and sentencepiece's.
        corpus: Name, files, bytes and SHA-256 of the text; pairs kept and skipped, by reason;
            lines per class by class number, or the range of the scores.
        settings: See `settings.PrepareSettings.record`; a given tokenizer with its SHA-256.
        documents: The policy in words: how documents begin and end.
        tokenizer: ``pieces``, and the lines used and skipped in its training (null if given).
        ids: ``offset`` (fairseq id - Megatron id of every text piece), ``eos``, ``unk``
            (Megatron's), ``specials`` (Megatron id -> fairseq id), ``mask_piece``.
        vocabulary: ``fairseq_rows``, ``megatron_padded`` (its default divisor, no tensor
            parallelism).
        splits: Counts per dataset: ``train``, or ``train.de-en.de``, or ``input0/train``, ...
        files: Path inside the folder -> SHA-256.
    """

    format: int
    versions: dict[str, str]
    corpus: dict[str, object]
    settings: dict[str, object]
    documents: str
    tokenizer: dict[str, object]
    ids: dict[str, object]
    vocabulary: dict[str, int]
    splits: dict[str, SplitCounts]
    files: dict[str, str]

    @property
    def offset(self) -> int:
        """Fairseq id minus Megatron id of every text piece."""
        return int(str(self.ids["offset"]))

    def write(self, folder: Path) -> None:
        """Write ``manifest.json`` into the folder."""
        text = json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"
        (folder / NAME).write_text(text, encoding="utf-8", newline="\n")


def load(folder: Path | str) -> Manifest:
    """Return the record of a prepared folder; raise `DataError` when there is none."""
    path = Path(folder) / NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"prepared data: got {folder}; it has no {NAME}. Run 'normplugin prepare --out' first."
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"prepared data: got {path}; it cannot be read ({error}). Prepare the data again."
        ) from None
    return _parse(path, data)


def verify(folder: Path | str) -> Manifest:
    """Return the record after checking every file's SHA-256; raise `DataError` on a difference."""
    manifest = load(folder)
    _verify(Path(folder), manifest.files)
    return manifest


def tokenizer_of(folder: Path) -> Path:
    """Return the model of a prepared folder, after checking it and fairseq's dictionaries."""
    files = load(folder).files
    _verify(folder, {name: files[name] for name in files if name.endswith((".model", ".txt"))})
    return folder / "spm.model"


def _verify(folder: Path, files: Mapping[str, str]) -> None:
    for name, digest in files.items():
        path = folder / name
        found = sha256(path) if path.is_file() else "no file"
        if found != digest:
            raise DataError(
                f"prepared data: got {found[:12]} for {path}; the manifest says {digest[:12]}. "
                "Prepare the data again with --overwrite."
            )


def hashes(folder: Path) -> dict[str, str]:
    """Return path inside the folder -> SHA-256 of every file."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256(path) for path in paths}


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _parse(path: Path, data: object) -> Manifest:
    names = {field.name for field in dataclasses.fields(Manifest)}
    if not isinstance(data, Mapping) or data.get("format") != FORMAT or set(data) != names:
        raise DataError(
            f"prepared data: got {path}; it is no manifest of format {FORMAT}. "
            "Prepare the data again with this version."
        )
    splits = {split: SplitCounts(**counts) for split, counts in data["splits"].items()}
    return Manifest(**{**data, "splits": splits})
