"""The table, ``results.json`` and ``report.md``."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from normplugin.compare.collect import Numbers, cautions
from normplugin.compare.plan import Settings, write_json, write_text
from normplugin.compare.run import Run
from normplugin.data.manifest import Manifest

JSON, MARKDOWN = "results.json", "report.md"
_HEAD = (
    *("arm", "loss, nats/token", "change", "bits/byte", "parameters", "change"),
    *("tokens/s", "speed", "peak memory"),
)


@dataclass(frozen=True)
class Results:
    """Everything that a report says; the first run and the first numbers are the baseline's."""

    settings: Settings
    versions: Mapping[str, str]
    manifest: Manifest
    runs: Sequence[Run]
    numbers: Sequence[Numbers]
    mismatches: Sequence[str]


def text(results: Results) -> str:
    """Return what is printed: the table and its cautions."""
    return "\n".join(
        [
            _table(_HEAD, [_row(one, results.numbers[0]) for one in results.numbers]),
            "",
            *(f"not comparable: {line}." for line in results.mismatches),
            *(f"caution: {line}" for line in cautions(results.runs, results.numbers)),
        ]
    )


def write(results: Results, out: Path) -> None:
    """Write ``results.json`` and ``report.md``, each completely or not at all."""
    write_json(out / JSON, _json(results))
    write_text(out / MARKDOWN, _markdown(results))


def remove(out: Path) -> None:
    """Delete an earlier comparison's report; the arms stay."""
    for name in (JSON, MARKDOWN):
        (out / name).unlink(missing_ok=True)


def _row(one: Numbers, baseline: Numbers) -> list[str]:
    first = one is baseline
    extra = one.parameters - baseline.parameters
    doubt = " ?" if one.doubtful(baseline) or baseline.doubtful(baseline) else ""
    return [
        one.arm + (" (baseline)" if first else ""),
        f"{one.loss:.4f}",
        "" if first else f"{one.loss - baseline.loss:+.4f}",
        f"{one.bits_per_byte:.4f}",
        f"{one.parameters:,}",
        "" if first else f"{extra:+,} ({extra / baseline.parameters:+.2%})",
        f"{one.tokens_per_second:,.0f}",
        f"{one.tokens_per_second / baseline.tokens_per_second:.2f}x{doubt}",
        f"{one.peak_memory_bytes / 2**20:,.0f} MiB",
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned Markdown table: first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = [
        "-" * width if place == 0 else "-" * (width - 1) + ":" for place, width in enumerate(widths)
    ]
    return "\n".join(_line(cells, widths) for cells in (head, rule, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return "| " + " | ".join(padded) + " |"


def _json(results: Results) -> dict[str, object]:
    arms = [
        {
            "baseline": place == 0,
            "numbers": dataclasses.asdict(numbers),
            "wall_seconds": run.wall_seconds,
            "cpu_seconds": run.cpu_seconds,
            **dataclasses.asdict(run.record),
        }
        for place, (run, numbers) in enumerate(zip(results.runs, results.numbers, strict=True))
    ]
    return {
        "format": 1,
        "settings": dataclasses.asdict(results.settings),
        "versions": dict(results.versions),
        "machine": _machine(),
        "data": {
            "corpus": results.manifest.corpus,
            "splits": {name: vars(it) for name, it in results.manifest.splits.items()},
            "files": results.manifest.files,
        },
        "arms": arms,
        "mismatches": list(results.mismatches),
        "cautions": cautions(results.runs, results.numbers),
    }


def _machine() -> dict[str, object]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cpus": os.cpu_count(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _markdown(results: Results) -> str:
    speeds = ("arm", "lower quartile", "median", "upper quartile")
    arms = [run.arm for run in results.runs]
    parts = [
        "# Comparison",
        text(results),
        "## What was done",
        "\n".join(f"- {line}" for line in _done(results)),
        "## Tokens per second of the log intervals",
        _table(speeds, [_speeds(one) for one in results.numbers]),
        "## Model and hyperparameters",
        _table(("setting", *arms), _hyperparameters(results)),
    ]
    return "\n\n".join(parts) + "\n"


def _done(results: Results) -> list[str]:
    valid, machine = results.manifest.splits["valid"], _machine()
    facts, settings = results.runs[0].record.facts, results.settings
    return [
        f"text: {results.manifest.corpus['name']}; validation on {valid.predicted():,} tokens "
        f"(the end of each document included), {valid.bytes:,} bytes",
        f"{facts['updates']:,} updates, {facts['trained tokens']:,} target tokens per arm, window "
        f"{facts['window']}, seed {facts['seed']}",
        "fairseq's own trainer, one process per arm, one arm after another, on "
        f"{settings.device} with {settings.threads} threads; glibc's allocator keeps freed memory",
        "data order: same seed, same data, same place in it at the end, same number of tokens in "
        "every log interval; the order itself is not hashed",
        "tokens/s: target tokens over wall time, median of the log intervals after the first "
        "quarter; peak memory: largest resident set of the process",
        f"machine: {machine['processor']}, {machine['cpus']} CPUs, {machine['system']}",
        "versions: " + ", ".join(f"{name} {it}" for name, it in results.versions.items()),
    ]


def _speeds(one: Numbers) -> list[str]:
    low, high = one.quartiles
    return [one.arm, *(f"{speed:,.0f}" for speed in (low, one.tokens_per_second, high))]


def _hyperparameters(results: Results) -> list[list[str]]:
    records = [run.record for run in results.runs]
    schemes = [it.scheme or {"name": "-", "architecture_hash": "-"} for it in records]
    return [
        ["model", *(it.model for it in records)],
        ["norm scheme", *(it["name"] for it in schemes)],
        ["architecture hash", *(it["architecture_hash"] for it in schemes)],
        *(
            [name, *(str(it.hyperparameters[name]).strip("[]") for it in records)]
            for name in records[0].hyperparameters
        ),
    ]
