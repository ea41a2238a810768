"""The rows of a benchmark's CSV file, and what the file says about where they come from."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.timing import Spread


@dataclass(frozen=True)
class Row:
    """One measured quantity of one variant.

    Metrics: ``time`` (s) and ``ratio`` (to the baseline named in ``unit``, same round), and both of
    the process's CPU time (``cpu_time``, ``cpu_ratio``); ``saved`` and ``saved_extra`` (d_model
    elements per layer and token); ``parameters``; ``collectives`` and ``collectives_extra``.
    """

    case: str
    scheme: str
    framework: str
    mode: str
    metric: str
    unit: str
    shape: str
    dtype: str
    p20: float
    p50: float
    p80: float
    bytes_moved: str = ""  # by the collectives of one rank; of memory traffic nothing is measured


@dataclass(frozen=True)
class Origin:
    """The columns that are the same in every row."""

    device: str
    torch: str
    framework_version: str
    commit: str = field(default_factory=lambda: _commit())
    command: str = field(default_factory=lambda: " ".join(["python -m benchmarks", *sys.argv[1:]]))
    utc: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds")
    )


COLUMNS = [f.name for f in (*fields(Row), *fields(Origin))]


def percentiles(sample: Spread | float) -> dict[str, float]:
    """The percentile columns; a count has the same value in all."""
    if isinstance(sample, Spread):
        return {"p20": sample.p20, "p50": sample.p50, "p80": sample.p80}
    return dict.fromkeys(("p20", "p50", "p80"), sample)


def write_csv(path: Path, suites: Iterable[tuple[list[Row], Origin]]) -> None:
    """Write the rows of every suite with the columns of their origin."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for rows, origin in suites:
            for row in rows:
                line = asdict(row) | asdict(origin)
                writer.writerow(
                    {k: f"{v:.8g}" if isinstance(v, float) else v for k, v in line.items()}
                )


def _commit() -> str:
    """The checkout's commit, marked when tracked files differ; empty outside a checkout."""
    root = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
