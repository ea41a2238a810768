"""Which pictures a comparison's results give: losses along the runs, and by learning rate."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from normplugin.compare.pictures import Line, Picture
from normplugin.compare.results import Arm, Point, Results, mean_curve

_LOSS = "validation loss (nats per token)"
_EARLY = 0.2  # part of a run whose losses are not what a picture is scaled by
_ZOOMED = "The first losses may lie outside of the picture."
_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def losses(results: Results) -> Iterator[Picture]:
    """Yield validation loss over updates and over time, its distance to the baseline, training."""
    curves = [mean_curve(arm.at_best()) for arm in results.arms]
    if not any(curves):
        return
    names = [arm.name for arm in results.arms]
    ends = {n: curve[-1].loss for n, curve in zip(names, curves, strict=True) if curve}
    alt = "at the end " + listed(ends)
    limits = _limits([run.valid for arm in results.arms for run in arm.at_best()])
    unit, seconds = _unit([point.seconds for curve in curves for point in curve])
    yield Picture(
        "loss-updates",
        "Validation loss by updates",
        "updates",
        _LOSS,
        _valid(results.arms, lambda point: point.update),
        alt,
        "As many updates are as much training text. Lower is better. Thin: single seeds. "
        + _ZOOMED,
        limits=limits,
    )
    yield Picture(
        "loss-time",
        "Validation loss by wall time",
        f"{unit} of training",
        _LOSS,
        _valid(results.arms, lambda point: point.seconds / seconds),
        alt,
        "What an arm's speed does to it. Start-up, validation and checkpoints are left out.",
        limits=limits,
    )
    yield from _distance(results, curves)
    yield _train(results.arms)


def rates(results: Results) -> Picture | None:
    """Return the final loss by learning rate; None without a sweep."""
    places = sorted({run.lr for arm in results.arms for run in arm.runs})
    ended = [it.valid[-1].loss for arm in results.arms for it in arm.runs if it.has_loss]
    if len(places) < 2 or not ended:
        return None
    lines = [line for place, arm in enumerate(results.arms) for line in _by_rate(place, arm, ended)]
    best = {arm.name: arm.best_lr for arm in results.arms if arm.best_lr}
    return Picture(
        "rates",
        "Final validation loss by learning rate",
        "peak learning rate",
        _LOSS,
        lines,
        "best learning rates: " + listed(best),
        "Mean over the seeds. A cross above the lines: a run that failed or diverged.",
        log="x",
        ticks=places,
    )


def ramps(results: Results) -> Picture | None:
    """Return the training loss while the learning rate grows; None without a ramp."""
    survived = {
        arm.name: statistics.fmean(it.survived for it in arm.ramps)
        for arm in results.arms
        if arm.ramps
    }
    lines = [
        Line(place, [p.update for p in run.train], [p.loss for p in run.train], thin=number > 0)
        for place, arm in enumerate(results.arms)
        for number, run in enumerate(arm.runs)
        if run.ramp and run.train
    ]
    if not lines:
        return None
    return Picture(
        "ramp",
        "Training loss while the learning rate grows",
        "updates (the learning rate grows with them)",
        "training loss (nats per token)",
        lines,
        "updates survived: " + listed(survived),
        "The further to the right before the loss explodes, the more stable.",
    )


def listed(values: dict[str, float]) -> str:
    """Return names and numbers in words, for those who do not see the picture."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items()) or "no values"


def _unit(seconds: Sequence[float]) -> tuple[str, float]:
    return next(it for it in _UNITS if max(seconds) > 3 * it[1] or it[1] == 1.0)


def _limits(curves: Sequence[Sequence[Point]]) -> tuple[float, float] | None:
    """Return limits that hold all losses but the early ones, whose fall would flatten the rest."""
    last = max((curve[-1].update for curve in curves if curve), default=0)
    late = [p.loss for curve in curves for p in curve if p.update > _EARLY * last]
    if not late:
        return None
    room = 0.06 * (max(late) - min(late)) or 1.0
    return min(late) - room, max(late) + room


def _valid(arms: Sequence[Arm], x: Callable[[Point], float]) -> list[Line]:
    lines = []
    for place, arm in enumerate(arms):
        runs = [run.valid for run in arm.at_best() if run.has_loss]
        if len(runs) > 1:
            lines += [Line(place, [x(p) for p in r], [p.loss for p in r], thin=True) for r in runs]
        curve = mean_curve(arm.at_best())
        if curve:
            lines.append(Line(place, [x(p) for p in curve], [p.loss for p in curve]))
    return lines


def _distance(results: Results, curves: Sequence[Sequence[Point]]) -> Iterator[Picture]:
    base = {point.update: point.loss for point in curves[0]}
    away = {
        place: both
        for place, curve in enumerate(curves)
        if place and (both := [_less(point, base) for point in curve if point.update in base])
    }
    if away:
        yield Picture(
            "loss-distance",
            f"Distance to {results.baseline}'s validation loss",
            "updates",
            "difference (nats per token)",
            [Line(at, [p.update for p in it], [p.loss for p in it]) for at, it in away.items()],
            "at the end " + listed({results.arms[at].name: it[-1].loss for at, it in away.items()}),
            f"Below the dotted line: better than {results.baseline} after as many updates. "
            + _ZOOMED,
            level=0.0,
            limits=_limits([*away.values(), [Point(p.update, 0, 0.0, 0.0) for p in curves[0]]]),
        )


def _less(point: Point, base: Mapping[int, float]) -> Point:
    return dataclasses.replace(point, loss=point.loss - base[point.update])


def _train(arms: Sequence[Arm]) -> Picture:
    runs = [(place, run) for place, arm in enumerate(arms) for run in arm.at_best()[:1]]
    ends = {arms[place].name: run.train[-1].loss for place, run in runs if run.train}
    return Picture(
        "loss-train",
        "Training loss by updates",
        "updates",
        "training loss (nats per token)",
        [Line(at, [p.update for p in run.train], [p.loss for p in run.train]) for at, run in runs],
        "at the end " + listed(ends),
        "The first seed of each arm; noisier than validation. " + _ZOOMED,
        limits=_limits([run.train for _, run in runs]),
    )


def _by_rate(place: int, arm: Arm, ended: Sequence[float]) -> list[Line]:
    x, y, lost = [], [], []
    for lr in dict.fromkeys(run.lr for run in arm.runs):
        runs = [run for run in arm.runs if run.lr == lr]
        done = [run.valid[-1].loss for run in runs if run.has_loss]
        if done:
            x.append(lr)
            y.append(statistics.fmean(done))
        if len(done) < len(runs):
            lost.append(lr)
    above = 0.08 * (place + 1.0)  # arms that failed at the same rate, one over the other
    top = max(ended) + above * (max(ended) - min(ended) or 1.0)
    lines = [Line(place, x, y)] if x else []
    return [*lines, Line(place, lost, [top] * len(lost), crosses=True)] if lost else lines
