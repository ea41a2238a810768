"""Records: JSON lines, one number per line.

    {"schema": 1, "update": 20, "stack": "decoder", "layer": 3, "part": "ffn",
     "name": "raw_variance", "value": 0.81}

``layer`` counts from 1 over the whole stack; 0 is in front of the first layer, null is outside the
layers (final norm, output projection, the whole run: stack ""). ``value`` is null where LayerDrop
skipped the layer in every micro-batch. A run that resumes appends to its file; what it repeats
counts instead of what stood there before. `normplugin.diagnostics.quantities` defines the names.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from normplugin.diagnostics.options import DiagnosticsError

SCHEMA = 1
BATCHES = "batches_crc32"  # see batches.py


@dataclass(frozen=True)
class Record:
    """One number of one update."""

    update: int
    stack: str
    layer: int | None
    part: str
    name: str
    value: float | None

    @property
    def place(self) -> tuple[int, str, int | None, str, str]:
        """All but the value."""
        return self.update, self.stack, self.layer, self.part, self.name


def append(path: Path, records: Iterable[Record]) -> None:
    """Append whole lines and flush; a line that an earlier crash cut short is removed.

    Raises:
        DiagnosticsError: If the file cannot be written.
    """
    text = "".join(json.dumps({"schema": SCHEMA, **asdict(record)}) + "\n" for record in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            _drop_cut_line(file)
            file.write(text.encode())
    except OSError as error:
        raise DiagnosticsError(
            f"records: got {path}; writing it failed ({error.strerror}). Name a file that can be "
            "written."
        ) from None


def read(path: Path) -> tuple[list[Record], list[str]]:
    """Return the records of a file, and one sentence for each thing that is wrong with it.

    A last line that was cut short is left out; a value that is not finite is kept.

    Raises:
        DiagnosticsError: If there is no such file, or a line of it is no record of this schema.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DiagnosticsError(
            f"{path}: got a file that cannot be read ({error}); legal are records of "
            "--diagnostics-interval. Name another."
        ) from None
    warnings = []
    if lines.pop():
        warnings.append(f"{path}: its last line was cut short and is left out.")
    found: dict[tuple, Record] = {}
    for number, line in enumerate(lines, 1):
        record = _parse(line, f"{path}:{number}")
        found[record.place] = record
    bad = [r for r in found.values() if r.value is not None and not math.isfinite(r.value)]
    if bad:
        first = bad[0]
        warnings.append(
            f"{path}: {len(bad)} values are not finite, the first at update {first.update}: "
            f"layer {first.layer}, {first.part}, {first.name}."
        )
    return list(found.values()), warnings


def _parse(line: str, where: str) -> Record:
    try:
        fields: dict[str, Any] = json.loads(line)
        schema = fields.pop("schema")
        if schema == SCHEMA:
            return Record(**fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DiagnosticsError(
            f"{where}: got {line[:60]!r}; legal are JSON lines of normplugin's diagnostics. "
            "Remove the line, or measure again."
        ) from None
    raise DiagnosticsError(
        f"{where}: got schema {schema}; this normplugin reads schema {SCHEMA}. Measure again, or "
        "read it with the version that wrote it."
    )


def _drop_cut_line(file) -> None:
    """Cut an open file behind its last newline."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 4096)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    file.truncate(end)
