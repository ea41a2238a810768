"""What a comparison found: the dataclasses behind ``results.json``, and reading it again.

loss        nats per predicted token of the validation split
per byte    the same loss over the bytes of the raw text: comparable between tokenizers
seconds     of training alone: start-up, validation and checkpoints are left out
tokens/s    predicted tokens (no padding) over those seconds, the median of a run's log intervals
            after the first quarter of them

A number that a run, an arm or a model kind does not have is None.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from normplugin.compare.folder import write_json
from normplugin.errors import CompareError

SCHEMA = 1
NAME = "results.json"
FINISHED, FAILED, DIVERGED = STATUSES = ("finished", "failed", "diverged")
VERDICTS = (
    *("baseline", "better", "worse", "no difference shown"),
    *("one seed", "not tested", "failed"),
)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Point:
    """One place of a curve: updates, tokens and seconds of training so far, and the loss there."""

    update: int
    tokens: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Ramp:
    """A learning rate that grew by `rate_per_update` until the loss exploded, or the run ended.

    Attributes:
        rate_per_update: Slope of the learning rate.
        survived: Updates before the loss exploded.
        rate: Learning rate reached there.
        exploded: False where the run ended first.
    """

    rate_per_update: float
    survived: int
    rate: float
    exploded: bool


@dataclass(frozen=True)
class Run:
    """One arm at one learning rate with one seed.

    Attributes:
        lr: Peak learning rate.
        seed: Of the initial weights and of the data order.
        status: One of `STATUSES`.
        stopped_at: Updates done where it failed or diverged.
        reason: Why it failed or diverged.
        command: Of the trainer.
        log: The trainer's output.
        train: Mean training loss of every log interval.
        valid: Validation losses along the run; the last is the result.
        step_seconds: Median seconds of an update, see the module.
        tokens_per_second: See the module.
        quartiles: Of the tokens per second of the measured intervals.
        peak_memory_bytes: Of the process on the CPU (resident), of the device on a GPU (allocated).
        cpu_share: CPU seconds per second of the process.
        diagnostics: File of the diagnostics' records.
        ramp: Of a run with ``--lr-ramp``.
    """

    lr: float
    seed: int
    status: str
    stopped_at: int | None
    reason: str | None
    command: list[str]
    log: str
    train: list[Point]
    valid: list[Point]
    step_seconds: float | None
    tokens_per_second: float | None
    quartiles: list[float]
    peak_memory_bytes: int | None
    cpu_share: float | None
    diagnostics: str | None
    ramp: Ramp | None

    @property
    def has_loss(self) -> bool:
        """Whether it came to its end, with a result."""
        return self.status == FINISHED and bool(self.valid)


@dataclass(frozen=True)
class Loss:
    """Final validation loss over the seeds: mean, sample standard deviation (n > 1), count."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class LossAt:
    """Losses where all arms have had the same updates, tokens or seconds of training."""

    updates: float
    tokens: float
    seconds: float


@dataclass(frozen=True)
class Arm:
    """One arm: all its runs, and its numbers at its best learning rate, over the seeds.

    Attributes:
        name: As in ``--arms``.
        scheme: Norm scheme; None for the framework's own model.
        options: On top of the scheme, or of the trainer, for this arm only.
        parameters: Trained parameters.
        parameter_delta: Against the baseline.
        runs: In the order of the learning rates, then of the seeds.
        best_lr: With the lowest mean loss among those with which every seed finished.
        loss: There.
        loss_at: The mean curve where every arm has had as much of something.
        bits_per_byte: None for a masked language model.
        token_perplexity: exp(loss).
        word_perplexity: Per white-space separated word of the raw text.
        speed_ratio: Tokens per second over the baseline's.
        speed_in_doubt: The machine had other work, or the run's speed moved by more than 10 %.
        memory_ratio: Peak memory over the baseline's.
        updates_to_baseline_loss: Until the mean curve reached the baseline's final loss.
        seconds_to_baseline_loss: The same in seconds of training.
        p_value: Of Welch's t-test against the baseline.
        verdict: One of `VERDICTS`.
    """

    name: str
    scheme: str | None
    options: list[str]
    parameters: int | None
    parameter_delta: int | None
    runs: list[Run]
    best_lr: float | None
    loss: Loss | None
    loss_at: LossAt | None
    bits_per_byte: float | None
    token_perplexity: float | None
    word_perplexity: float | None
    speed_ratio: float | None
    speed_in_doubt: bool
    memory_ratio: float | None
    updates_to_baseline_loss: float | None
    seconds_to_baseline_loss: float | None
    p_value: float | None
    verdict: str

    @property
    def ramps(self) -> list[Ramp]:
        """How every run survived the growing learning rate."""
        return [run.ramp for run in self.runs if run.ramp]

    def at_best(self) -> list[Run]:
        """Return the runs at the best learning rate."""
        return [run for run in self.runs if run.lr == self.best_lr]


@dataclass(frozen=True)
class Results:
    """A whole comparison; the first arm is the baseline.

    Attributes:
        schema: `SCHEMA`.
        title: One line.
        settings: What every run shares, as on the command line.
        versions: Of the packages that decide a result.
        machine: Processor and system.
        data: Name of the text, hash, and the counts of its splits.
        facts: What was found equal in all runs.
        baseline: Name of the first arm.
        arms: The baseline first.
        mismatches: What differs between runs and was allowed to.
        cautions: What a reader must know before concluding anything.
    """

    schema: int
    title: str
    settings: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    data: dict[str, Any]
    facts: dict[str, Any]
    baseline: str
    arms: list[Arm]
    mismatches: list[str]
    cautions: list[str]

    @property
    def is_ramp(self) -> bool:
        """Whether the learning rate grew until the loss exploded."""
        return any(arm.ramps for arm in self.arms)


def mean_curve(runs: Sequence[Run]) -> list[Point]:
    """Return the mean over the finished runs of their validations."""
    curves = [run.valid for run in runs if run.has_loss]
    return [
        Point(
            update=points[0].update,
            tokens=round(statistics.fmean(point.tokens for point in points)),
            seconds=statistics.fmean(point.seconds for point in points),
            loss=statistics.fmean(point.loss for point in points),
        )
        for points in zip(*curves, strict=False)
    ]


def write(results: Results, out: Path) -> None:
    """Write ``results.json`` completely or not at all."""
    write_json(out / NAME, dataclasses.asdict(results))


def read(path: Path) -> Results:
    """Return the results in a file; raise `CompareError` for another schema version."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("schema") == SCHEMA:
            return from_json(Results, data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CompareError(
            f"{path}: got a file that cannot be read as results ({error}). Compare again."
        ) from None
    raise CompareError(
        f"{path}: got results of schema {data.get('schema')!r}; this version reads {SCHEMA}. "
        "Compare again with this version, or read them with theirs."
    )


def from_json(kind: type[_T], data: Any) -> _T:
    """Return the dataclass that ``dataclasses.asdict`` made this of."""
    return typing.cast(_T, _build(kind, data))


def _build(kind: Any, data: Any) -> Any:
    arguments = typing.get_args(kind)
    if isinstance(kind, types.UnionType):  # X | None
        return None if data is None else _build(arguments[0], data)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _build(hints[name], value) for name, value in data.items()})
    if typing.get_origin(kind) is list:
        return [_build(arguments[0], value) for value in data]
    return data
