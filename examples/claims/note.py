"""Write a note about the papers' claims from the comparisons of run.sh; see there.

    python note.py FOLDER NOTE

FOLDER holds the comparisons, as far as they are finished; NOTE/README.md and its pictures are
written. A claim holds where the means over the seeds stand in the claimed order.
"""

from __future__ import annotations

import datetime
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from normplugin.compare import curves, depth, pictures, report, results
from normplugin.compare.pictures import Picture
from normplugin.compare.results import Arm, Results
from normplugin.diagnostics import records
from normplugin.diagnostics.records import Record

Records = Mapping[str, Sequence[Sequence[Record]]]  # by arm, then by run
BASE = "upstream"  # fairseq's own Pre-LN model
GRADIENT = ("postln", "normformer", BASE)
STABILITY = ("normformer", BASE, "normformer+residual-scale")
VARIANCE = ("postln", "periln", BASE)
_HEAD = """# The papers' claims at a size that a CPU trains

Written by `examples/claims/note.py` from the comparisons of `examples/claims/run.sh`. An order
holds where the means over the seeds stand in it; what holds or fails here says nothing about larger
models or longer runs."""
_DEPTH = ("gradient-", "variance-")  # of the pictures over depth, those that are shown


class Claim(NamedTuple):
    """What a paper says, whether it was seen, and the numbers it is told by."""

    verdict: str
    numbers: Sequence[str] = ()


def main(folder: Path, note: Path) -> None:
    """Write the note about what is there."""
    note.mkdir(parents=True, exist_ok=True)
    short, parts = [], []
    inside = (_losses, _gradients, _variance)
    for name, title, claims, pictured in (
        ("rates", "Causal language models, every learning rate", (_rates,), _sweep),
        ("lm", "Causal language models", inside, _trained),
        ("long", "Causal language models, longer", (_losses,), _trained),
        ("ramp", "Learning-rate ramp", (_stability,), _ramp),
        ("mlm-rates", "Masked language models, every learning rate", (_rates,), _sweep),
        ("mlm", "Masked language models", inside, _trained),
    ):
        path = folder / name / results.NAME
        if path.is_file():
            found = results.read(path)
            read = {arm.name: _read(arm, path.parent) for arm in found.arms}
            told = [claim(found, read) for claim in claims]
            short += [f"- {title}: {claim.verdict}" for claim in told]
            day = datetime.date.fromtimestamp(path.stat().st_mtime)
            parts += [f"## {title}", f"{day}. {_setting(found)}", report.text(found)]
            parts += [part for claim in told for part in claim.numbers]
            parts += _drawn(pictured(found, path.parent), found, note / name)
    text = "\n\n".join([_HEAD, "\n".join(short), *parts]) + "\n"
    (note / "README.md").write_text(text, encoding="utf-8")


def _setting(found: Results) -> str:
    it, seeds = found.settings, len(found.settings["seeds"])
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    return (
        f"Size {it['size']} (layers x width x heads), {it['updates']:,} updates of {it['batch']} x "
        f"{it['window']} tokens, {seeds} seed{'s' * (seeds > 1)}; {versions}."
    )


def _rates(found: Results, read: Records) -> Claim:
    """Where each arm is to be looked at: neither at the lowest nor at the highest rate."""
    said = [f"{arm.name} {arm.best_lr:g}" for arm in found.arms if arm.best_lr]
    tried = ", ".join(f"{lr:g}" for lr in found.settings["lrs"])
    return Claim(f"best of {tried}: {', '.join(said)}.")


def _losses(found: Results, read: Records) -> Claim:
    """Both papers: a lower loss than Pre-LN's."""
    said = [f"{arm.name} {arm.loss.mean:.3f} ({arm.verdict})" for arm in found.arms if arm.loss]
    return Claim(f"final validation loss: {', '.join(said)}.")


def _gradients(found: Results, read: Records) -> Claim:
    """NormFormer, Figure 3: mean absolute gradient of the second FFN weight, first/last layer."""
    table = {
        name: _over_seeds(runs, None, "fc2", "gradient_mean_abs_first_over_last")
        for name, runs in read.items()
    }
    what = "gradient of the second FFN weight, first over last layer, mean over the records"
    return Claim(
        _order(f"{what}, smallest first", GRADIENT, _means(table)),
        [
            "### Gradient of the second FFN weight, first over last layer",
            "NormFormer's Figure 3 reports 0.11 for Post-LN, 1.5 for NormFormer, 4.2 for Pre-LN.",
            _by_update(table),
        ],
    )


def _variance(found: Results, read: Records) -> Claim:
    """Peri-LN: Pre-LN's residual stream grows most with depth, Post-LN's does not."""
    layers = max((it.layer or 0 for run in read[BASE] for it in run), default=0)
    tables = [
        {name: _over_seeds(runs, at, "stream", "variance") for name, runs in read.items()}
        for at in (0, layers)
    ]
    growth = {
        name: {update: value / tables[0][name][update] for update, value in last.items()}
        for name, last in tables[1].items()
    }
    ends = {name: [*values.values()][-1] for name, values in growth.items() if values}
    over = f"behind layer {layers} over that in front of layer 1"
    return Claim(
        _order(f"variance of the stream {over}, after training, smallest first", VARIANCE, ends),
        [f"### Variance of the residual stream {over}", _by_update(growth)],
    )


def _stability(found: Results, read: Records) -> Claim:
    """NormFormer, Figure 5: updates survived."""
    survived = {
        arm.name: statistics.fmean(it.survived for it in arm.ramps)
        for arm in found.arms
        if arm.ramps
    }
    return Claim(_order("updates survived, most first", STABILITY, survived, descending=True))


def _order(
    what: str, names: Sequence[str], values: dict[str, float], descending: bool = False
) -> str:
    """Say whether the values of the names stand in the claimed order."""
    missing = [name for name in names if name not in values]
    if missing:
        return f"{what}: not measured for {', '.join(missing)}."
    pairs = itertools.pairwise(values[name] for name in names)
    holds = all(a >= b if descending else a <= b for a, b in pairs)
    said = ", ".join(f"{name} {values[name]:.3g}" for name in names)
    return f"{what}: {said}. The claimed order **{'holds' if holds else 'does not hold'}**."


def _means(table: dict[str, dict[int, float]]) -> dict[str, float]:
    return {name: statistics.fmean(row.values()) for name, row in table.items() if row}


def _by_update(table: dict[str, dict[int, float]]) -> str:
    """Return a table of an arm's values at about five of its records."""
    updates = sorted({update for row in table.values() for update in row})
    shown = updates[:: max(1, len(updates) // 4)]
    shown += [updates[-1]] if updates and updates[-1] not in shown else []
    rows = [
        f"| {name} | {' | '.join(f'{row[u]:.3g}' if u in row else '-' for u in shown)} |"
        for name, row in table.items()
    ]
    head = " | ".join(f"update {update:,}" for update in shown)
    return "\n".join([f"| arm | {head} |", f"| --- |{' ---: |' * len(shown)}", *rows])


def _over_seeds(
    runs: Sequence[Sequence[Record]], layer: int | None, part: str, name: str
) -> dict[int, float]:
    """Return the mean over the seeds of one quantity, by update, at the arm's best rate."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for record in run:
            if (record.layer, record.part, record.name) == (layer, part, name) and record.value:
                found.setdefault(record.update, []).append(record.value)
    return {update: statistics.fmean(values) for update, values in sorted(found.items())}


def _read(arm: Arm, folder: Path) -> list[list[Record]]:
    """Return the records of every run at the arm's best rate."""
    files = [depth.file(run.diagnostics, folder) for run in arm.at_best() if run.diagnostics]
    return [records.read(path)[0] for path in files]


def _sweep(found: Results, folder: Path) -> list[Picture | None]:
    return [curves.rates(found)]


def _ramp(found: Results, folder: Path) -> list[Picture | None]:
    return [curves.ramps(found)]


def _trained(found: Results, folder: Path) -> list[Picture | None]:
    """Losses, and the depth of the first seed."""
    by_depth = depth.pictures(found, depth.find(found, folder)[0])
    wanted = [it for it in by_depth if it.name.partition("-")[2].startswith(_DEPTH)]
    return [*itertools.islice(curves.losses(found), 1), curves.rates(found), *wanted]


def _drawn(drawn: Sequence[Picture | None], found: Results, prefix: Path) -> Iterator[str]:
    """Write pictures beside the note, and yield what shows them there."""
    names = [arm.name for arm in found.arms]
    for picture in filter(None, drawn):
        path = prefix.with_name(f"{prefix.name}-{picture.name}.svg")
        path.write_text(pictures.file(picture, names), encoding="utf-8")
        yield f"![{picture.title}: {picture.alt}]({path.name})"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
