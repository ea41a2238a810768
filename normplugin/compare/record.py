"""What both frameworks' runs are turned into: curves and speeds, and what identifies a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normplugin.compare.results import Point
from normplugin.diagnostics import records
from normplugin.diagnostics.options import DiagnosticsError
from normplugin.errors import CompareError

_WARM_UP_SHARE = 4  # one interval in four


@dataclass(frozen=True)
class Step:
    """One line of a training log.

    Attributes:
        update: Updates done.
        tokens: Per update, the mean since the line before.
        seconds: The same in seconds; None where other work than training was in them.
        loss: In nats per token, the mean since the line before.
    """

    update: int
    tokens: float
    seconds: float | None
    loss: float


@dataclass(frozen=True)
class Score:
    """One validation: updates done, and nats per token."""

    update: int
    loss: float


@dataclass(frozen=True)
class Trace:
    """A run's curves, and the speed of every log interval after the warm-up."""

    train: list[Point]
    valid: list[Point]
    step_seconds: list[float]
    tokens_per_second: list[float]


@dataclass(frozen=True)
class Record:
    """What a finished run says about itself.

    Attributes:
        facts: What must be equal before two runs may be ranked.
        model: Class of the model, or what the framework calls it.
        scheme: Name of the norm scheme, where the model is ours.
        parameters: Number of trained parameters.
        loss: Final validation loss in nats per token.
        scored: Tokens it is the mean of.
        peak_memory_bytes: Of the device; None where it is the process's.
    """

    facts: dict[str, Any]
    model: str
    scheme: str | None
    parameters: int
    loss: float
    scored: int
    peak_memory_bytes: int | None


def batches(path: Path) -> list[list[float | None]]:
    """Return the hashes of all batches up to each record of the diagnostics, if there are any."""
    try:
        found = records.read(path)[0] if path.is_file() else []
    except DiagnosticsError as error:
        raise CompareError(str(error)) from None
    return [[record.update, record.value] for record in found if record.name == records.BATCHES]


def trace(events: Iterable[Step | Score]) -> Trace:
    """Return the curves of a log; where a run was resumed, what was done twice counts once."""
    steps: list[Step] = []
    scores: list[Score] = []
    for event in events:
        kept: list[Any] = steps if isinstance(event, Step) else scores
        while kept and kept[-1].update >= event.update:
            kept.pop()
        kept.append(event)
    measured = [s for s in steps[len(steps) // _WARM_UP_SHARE :] if s.seconds]
    seconds = [s.seconds for s in measured if s.seconds]
    typical = statistics.median(seconds) if seconds else 0.0
    train = _curve(steps, typical)
    return Trace(
        train=train,
        valid=[_place(score, train, typical) for score in scores],
        step_seconds=seconds,
        tokens_per_second=[s.tokens / s.seconds for s in measured if s.seconds],
    )


def _curve(steps: Sequence[Step], typical: float) -> list[Point]:
    """Sum up what the lines say; ``typical`` seconds stand for an update that was not measured."""
    points: list[Point] = []
    update, tokens, seconds = 0, 0.0, 0.0
    for step in steps:
        done = step.update - update
        update, tokens = step.update, tokens + done * step.tokens
        seconds += done * (step.seconds or typical)
        points.append(Point(update, round(tokens), seconds, step.loss))
    return points


def _place(score: Score, train: Sequence[Point], typical: float) -> Point:
    """Return a validation with the tokens and seconds of training at its update."""
    before = [point for point in train if point.update <= score.update]
    last = before[-1] if before else Point(0, 0, 0.0, 0.0)
    more = score.update - last.update
    per_update = last.tokens / last.update if last.update else 0.0
    tokens = last.tokens + round(more * per_update)
    return Point(score.update, tokens, last.seconds + more * typical, score.loss)
