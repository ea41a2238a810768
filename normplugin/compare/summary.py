"""The results of a comparison, put together: arms, what was equal, where and with what."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normplugin.compare import collect
from normplugin.compare.cautions import cautions
from normplugin.compare.collect import Entry
from normplugin.compare.frameworks import Dataset, Framework, versions
from normplugin.compare.plan import Settings
from normplugin.compare.results import SCHEMA, Results


def results(
    entries: Sequence[Entry],
    settings: Settings,
    data: Dataset,
    at: Framework,
    mismatches: list[str],
) -> Results:
    """Return everything that a report says."""
    arms = collect.arms(entries, settings, data)
    return Results(
        schema=SCHEMA,
        title=f"{', '.join(arm.name for arm in arms[1:])} against {at.name}'s own model",
        settings={**dataclasses.asdict(settings), "tokens": settings.tokens},
        versions=versions() | at.arms.versions(),
        machine=_machine(),
        data={
            "name": data.manifest.corpus.get("name"),
            "sha256": data.digest,
            "valid": dataclasses.asdict(data.valid),
            "splits": {name: vars(it) for name, it in data.manifest.splits.items()},
        },
        facts=_facts(entries),
        baseline=arms[0].name,
        arms=arms,
        mismatches=mismatches,
        cautions=cautions(arms, settings),
    )


def _facts(entries: Sequence[Entry]) -> dict[str, Any]:
    """The first finished run's facts that are short enough to read; the seeds differ by design."""
    record = next((entry.done.record for entry in entries if entry.done.record), None)
    if record is None:
        return {}
    hidden = ("seed", "learning rate")
    return {
        name: value
        for name, value in record.facts.items()
        if name not in hidden and value is not None and not (isinstance(value, list) and value[4:])
    }


def _machine() -> dict[str, object]:
    return {
        "processor": _processor(),
        "cpus": f"{os.cpu_count()} CPUs",
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
