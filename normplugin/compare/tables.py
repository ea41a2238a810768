"""The report's tables: numbers as they are shown, and why one is missing."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from normplugin.compare.results import Arm, Results, Run
from normplugin.compare.words import placement

NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class Cell:
    """A value, or a dash with the reason why there is none.

    Attributes:
        text: As shown.
        note: Smaller, behind it.
        arm: Place of the arm that it names; its marker is shown.
        words: Whether it is text, which is set to the left and may wrap.
    """

    text: str
    note: str = ""
    arm: int | None = None
    words: bool = False


@dataclass(frozen=True)
class Table:
    """Head and rows; the first column names the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def summary(results: Results) -> Table:
    """Return one row per arm with what was found."""
    if results.is_ramp:
        return _survived(results)
    head = (
        *("arm", "verdict", "validation loss, nats/token", "change", "perplexity per token"),
        *("perplexity per word", "bits per byte", "best learning rate"),
        *("updates to baseline's loss", "seconds to it"),
        *("speed", "peak memory", "parameters"),
    )
    rows = [_summary(place, results) for place in range(len(results.arms))]
    return Table("Every arm at its best learning rate, mean over its seeds", head, rows)


def placements(results: Results) -> Table:
    """Return where each arm's norms sit."""
    rows = [
        [_arm(place, results), Cell(placement(arm), words=True), _options(arm)]
        for place, arm in enumerate(results.arms)
    ]
    return Table("What each arm is", ("arm", "its norms and learned scales", "options"), rows)


def equal(results: Results) -> Table:
    """Return the losses where every arm has had as much."""
    rows = [
        [_arm(place, results), *(_number(value, ".4f") for value in vars(arm.loss_at).values())]
        for place, arm in enumerate(results.arms)
        if arm.loss_at
    ]
    head = ("arm", "at equal updates", "at equal tokens", "at equal seconds of training")
    return Table("Validation loss (nats per token) where every arm has had as much", head, rows)


def runs(results: Results) -> Table:
    """Return every run: how it ended, and how fast it was."""
    head = (
        *("arm", "learning rate", "seed", "validation loss", "seconds per update"),
        *("tokens per second", "their quartiles", "peak memory, MiB"),
    )
    rows = [
        [_arm(place, results), *_run(run, run.lr == arm.best_lr)]
        for place, arm in enumerate(results.arms)
        for run in arm.runs
    ]
    return Table("How every run ended, and how fast it was", head, rows)


def ramps(results: Results) -> Table:
    """Return how far each run got while its learning rate grew."""
    rows = [
        [
            _arm(place, results),
            Cell(str(run.seed)),
            Cell(f"{it.survived:,}"),
            Cell(f"{it.rate:.3g}"),
            Cell("the loss exploded" if it.exploded else "the run ended", words=True),
        ]
        for place, arm in enumerate(results.arms)
        for run in arm.runs
        if (it := run.ramp)
    ]
    head = ("arm", "seed", "updates survived", "learning rate reached", "then")
    return Table("Learning-rate ramp", head, rows)


def pairs(caption: str, values: dict[str, object]) -> Table:
    """Return names and values; what is nested is told by its path."""
    rows = [[Cell(name), Cell(value, words=True)] for name, value in _flat(values)]
    return Table(caption, ("name", "value"), rows)


def commands(results: Results) -> list[tuple[str, str, str]]:
    """Return every run's name, command and log."""
    return [
        (f"{arm.name}, learning rate {run.lr:g}, seed {run.seed}", shlex.join(run.command), run.log)
        for arm in results.arms
        for run in arm.runs
    ]


def _survived(results: Results) -> Table:
    rows = [
        [
            _arm(place, results),
            _verdict(arm),
            Cell(f"{statistics.fmean(it.survived for it in arm.ramps):,.0f}"),
            Cell(f"{statistics.fmean(it.rate for it in arm.ramps):.3g}"),
        ]
        for place, arm in enumerate(results.arms)
        if arm.ramps
    ]
    head = ("arm", "verdict", "updates survived", "learning rate reached")
    return Table("Every arm while its learning rate grew, mean over its seeds", head, rows)


def _verdict(arm: Arm) -> Cell:
    return Cell(arm.verdict, "" if arm.p_value is None else f"p = {arm.p_value:.2g}", words=True)


def _summary(place: int, results: Results) -> list[Cell]:
    arm, base = results.arms[place], results.arms[0]
    why = "not finished" if arm.loss is None else ""
    change = arm.loss.mean - base.loss.mean if place and arm.loss and base.loss else None
    masked = "not for masked models" if results.settings.get("kind") == "mlm" else "too large"
    doubt = "?" if arm.speed_in_doubt or base.speed_in_doubt else ""
    never = why or ("never" if base.loss else "no baseline")
    return [
        _arm(place, results),
        _verdict(arm),
        _loss(arm),
        _number(change, "+.4f", why or ("" if place else "baseline")),
        _number(arm.token_perplexity, _fine(arm.token_perplexity), why or "too large"),
        _number(arm.word_perplexity, _fine(arm.word_perplexity), why or masked),
        _number(arm.bits_per_byte, ".4f", why or masked),
        _number(arm.best_lr, "g", why),
        _number(arm.updates_to_baseline_loss, ",.0f", never),
        _number(arm.seconds_to_baseline_loss, ",.1f", never),
        _number(arm.speed_ratio, ".2f", why or "not measured", "x", doubt),
        _number(arm.memory_ratio, ".2f", why or "not measured", "x"),
        _parameters(arm),
    ]


def _run(run: Run, best: bool) -> list[Cell]:
    memory = run.peak_memory_bytes and run.peak_memory_bytes / 2**20
    loss = (
        Cell(f"{run.valid[-1].loss:.4f}")
        if run.has_loss
        else Cell(f"{run.status} at update {run.stopped_at}", run.reason or "")
    )
    quartiles = " to ".join(f"{speed:,.0f}" for speed in run.quartiles)
    return [
        Cell(f"{run.lr:g}", "best" if best else ""),
        Cell(str(run.seed)),
        loss,
        _number(run.step_seconds, ".4f", "not measured"),
        _number(run.tokens_per_second, ",.0f", "not measured"),
        Cell(quartiles) if quartiles else Cell(NONE, "not measured"),
        _number(memory, ",.0f", "not measured"),
    ]


def _arm(place: int, results: Results) -> Cell:
    return Cell(results.arms[place].name, arm=place, words=True)


def _options(arm: Arm) -> Cell:
    return Cell(shlex.join(arm.options), words=True) if arm.options else Cell("none", words=True)


def _loss(arm: Arm) -> Cell:
    if arm.loss is None:
        return Cell(NONE, "not finished")
    if arm.loss.std is None:
        return Cell(f"{arm.loss.mean:.4f}", "one seed")
    return Cell(f"{arm.loss.mean:.4f}", f"± {arm.loss.std:.4f} (n={arm.loss.n})")


def _parameters(arm: Arm) -> Cell:
    delta = "" if not arm.parameter_delta else f"{arm.parameter_delta:+,}"
    return _number(arm.parameters, ",", "no run finished", note=delta)


def _fine(value: float | None) -> str:
    return ",.2f" if value is None or value < 1000.0 else ",.0f"


def _number(
    value: float | None, form: str, reason: str = "", unit: str = "", note: str = ""
) -> Cell:
    return Cell(NONE, reason) if value is None else Cell(f"{value:{form}}{unit}", note)


def _flat(values: dict[str, object], path: str = "") -> list[tuple[str, str]]:
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _flat(value, f"{path}{name}, ")
        elif isinstance(value, list | tuple):
            found.append((path + name, ", ".join(map(str, value)) or "none"))
        else:
            whole = isinstance(value, int) and not isinstance(value, bool)
            found.append((path + name, f"{value:,}" if whole else str(value)))
    return found
