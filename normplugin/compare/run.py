"""One run: begun, or gone on with from its checkpoint; how it ended; kept for the next time."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import signal
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from normplugin.compare import process
from normplugin.compare.folder import differences, write_json
from normplugin.compare.frameworks import DIAGNOSTICS, LOG, Framework
from normplugin.compare.plan import Job, Settings
from normplugin.compare.progress import Progress
from normplugin.compare.record import Record, Score, Step, Trace, trace
from normplugin.compare.results import DIVERGED, FAILED, FINISHED, Ramp, Run, from_json
from normplugin.errors import CompareError

BEGUN, RESULT = "begun.json", "result.json"
_FORMAT = 2
_RESTARTS = 2  # of a trainer that was killed before its next checkpoint
_EXPLODED = 1.5  # times the lowest loss so far
_ERROR = re.compile(r"^(?:\[\w+\]: *)?(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b|\berror: ")
_NOT_A_NUMBER = re.compile(
    r"FloatingPointError|Minimum loss scale reached|\b(?:NaN|Inf|nan|inf) in the loss"
    r"|found (?:NaN|Inf) in|Unexpected result (?:nan|inf)"
)
_KILLS = (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True)
class Work:
    """What to start for a job, and what identifies its result."""

    job: Job
    command: Sequence[str]
    environment: Mapping[str, str]
    identity: Mapping[str, object]


@dataclass(frozen=True)
class Done:
    """A run that is over: what is reported, and what its trainer recorded if it ended well."""

    run: Run
    record: Record | None


def earlier(work: Work) -> Done | None:
    """Return the run that is already over and kept, None where there is none.

    Raises:
        CompareError: There is one of other settings, finished or begun.
    """
    folder = work.job.folder
    kept = next((folder / name for name in (RESULT, BEGUN) if (folder / name).is_file()), None)
    if kept is None:
        return None
    try:
        data = json.loads(kept.read_text(encoding="utf-8"))
        other = ["format"] if data["format"] != _FORMAT else []
        other = other or differences(work.identity, data["identity"])
        done = from_json(Done, data["done"]) if kept.name == RESULT and not other else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CompareError(
            f"{kept}: got a result that cannot be read ({error}). Pass --force to train it again."
        ) from None
    if other:
        raise CompareError(
            f"run {work.job.name!r}: got one in {folder} with other {', '.join(other)}. "
            "Name a new --out, or pass --force to train it again."
        )
    return done if done and done.run.status != FAILED else None


def train(work: Work, settings: Settings, at: Framework, progress: Progress) -> Done:
    """Begin a run or go on with it, and keep how it ended.

    A trainer that dies is started again while its checkpoints come forward, and after a kill in
    any case, but not for ever; Ctrl-C keeps the checkpoint.
    """
    folder = work.job.folder
    process.end_strays(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"format": _FORMAT, "identity": dict(work.identity), "command": [*work.command]}
    (folder / RESULT).unlink(missing_ok=True)  # of a failed run, which gets another chance
    write_json(folder / BEGUN, kept)
    end, at_start = _process(work, settings, at, progress)
    done = _judge(work, settings, at, end, at_start)
    write_json(folder / RESULT, {**kept, "done": dataclasses.asdict(done)})
    if done.run.status == FINISHED:
        at.records.tidy(folder)
    return done


def _process(
    work: Work, settings: Settings, at: Framework, progress: Progress
) -> tuple[process.End, int]:
    """Let the trainer come to an end; return it, and where its last process began in the log."""
    folder, kills = work.job.folder, 0
    while True:
        at.records.mend(folder)
        before = at.records.done(folder)
        at_start = (folder / LOG).stat().st_size if (folder / LOG).exists() else 0
        if before >= settings.updates:  # killed after the last update; fairseq would do one more
            return process.End(0, 0.0, 0.0, 0), at_start
        watch = _Watch(settings, at, progress)
        end = process.follow(work.command, work.environment, folder, watch)
        if not end.status or _NOT_A_NUMBER.search(_log(folder, at_start)):
            return end, at_start
        at.records.mend(folder)
        kills += end.status in _KILLS
        again = end.status in _KILLS and kills <= _RESTARTS
        if not (again or at.records.done(folder) > before):
            return end, at_start
        progress.say("its trainer was killed or failed; going on from its checkpoint")


def forget(job: Job) -> None:
    """Delete a run, so that it is trained from the start."""
    process.end_strays(job.folder)
    shutil.rmtree(job.folder, ignore_errors=True)


class _Watch:
    """Reads along: shows progress, and says when a run need not go on."""

    def __init__(self, settings: Settings, at: Framework, progress: Progress):
        self.settings, self.at, self.progress = settings, at, progress
        self.steps: list[Step] = []

    def __call__(self, text: str) -> bool:
        new = [event for event in self.at.records.events(text) if isinstance(event, Step)]
        for step in new:
            self.progress.advance(step.update, step.loss)
        self.steps += new
        return bool(new) and _gone_wrong(self.steps, self.settings.ramp)


def _gone_wrong(steps: Sequence[Step], ramp: bool) -> bool:
    return _explosion(steps) is not None if ramp else not math.isfinite(steps[-1].loss)


def _explosion(steps: Sequence[Step]) -> int | None:
    """Return the place of the line in which the loss exploded: no number, or far above its best."""
    best = math.inf
    for place, step in enumerate(steps):
        if not step.loss <= _EXPLODED * best:  # written so that NaN is an explosion
            return place
        best = min(best, step.loss)
    return None


def _judge(work: Work, settings: Settings, at: Framework, end: process.End, at_start: int) -> Done:
    """Say how a run ended, by its log and its checkpoint."""
    events = at.records.events(_log(work.job.folder))
    curves, record, reason = trace(events), None, None
    status = FINISHED
    if end.status == 0:
        try:
            record = at.records.read(work.job.folder, curves)
            _check_model(work.job, record)
        except CompareError as error:
            status, reason = FAILED, str(error)
    elif end.status is not None:
        said = _log(work.job.folder, at_start)
        status = DIVERGED if _NOT_A_NUMBER.search(said) else FAILED
        reason = _last_words(said, end.status)
    steps = [event for event in events if isinstance(event, Step)]
    ramp = _ramp(steps, settings, work.job) if settings.ramp and status != FAILED else None
    if end.status is None or (ramp and ramp.exploded):
        status, reason = DIVERGED, reason or "the loss exploded, or is not a number"
    elif record and steps and not record.loss <= steps[0].loss and not ramp:
        status = DIVERGED
        reason = f"the loss is {record.loss:.4f} at the end and was {steps[0].loss:.4f} at first"
    stopped = None if status == FINISHED else _stopped_at(steps, events)
    run = _run(work, curves, record, end)
    return Done(
        dataclasses.replace(run, status=status, stopped_at=stopped, reason=reason, ramp=ramp),
        record,
    )


def _stopped_at(steps: Sequence[Step], events: Sequence[Step | Score]) -> int:
    bad = [step.update for step in steps if not math.isfinite(step.loss)]
    return bad[0] if bad else max((event.update for event in events), default=0)


def _ramp(steps: Sequence[Step], settings: Settings, job: Job) -> Ramp:
    place = _explosion(steps)
    before = steps if place is None else steps[:place]
    survived = before[-1].update if before else 0
    slope = job.lr / settings.updates
    return Ramp(slope, survived, slope * survived, place is not None)


def _check_model(job: Job, record: Record) -> None:
    """Raise `CompareError` unless the trainer built the model that the arm promises."""
    promised = job.arm.placement.name if job.arm.placement else None
    if record.scheme != promised:
        raise CompareError(
            f"arm {job.arm.name!r}: got norm scheme {record.scheme} in its log; {promised} was to "
            "be trained. Another plugin may have taken the name."
        )


def _run(work: Work, curves: Trace, record: Record | None, end: process.End) -> Run:
    """Return a run's numbers; a loss that is no number is left out of the curves."""
    speeds = curves.tokens_per_second
    quarters = statistics.quantiles(speeds, n=4) if len(speeds) > 1 else [*speeds] * 3
    records = work.job.folder / DIAGNOSTICS
    valid = [point for point in curves.valid if math.isfinite(point.loss)]
    if record and valid:  # the checkpoint has more digits
        valid[-1] = dataclasses.replace(valid[-1], loss=record.loss)
    memory = record.peak_memory_bytes if record else None
    return Run(
        lr=work.job.lr,
        seed=work.job.seed,
        status="",
        stopped_at=None,
        reason=None,
        command=[*work.command],
        log=str(work.job.folder / LOG),
        train=[point for point in curves.train if math.isfinite(point.loss)],
        valid=valid,
        step_seconds=statistics.median(curves.step_seconds) if curves.step_seconds else None,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        quartiles=quarters[::2],
        peak_memory_bytes=memory or end.peak_memory_bytes or None,
        cpu_share=end.cpu_seconds / end.wall_seconds if end.cpu_seconds else None,
        diagnostics=str(records) if records.is_file() else None,
        ramp=None,
    )


def _last_words(said: str, status: int) -> str:
    """Return what a trainer said last of errors, in one line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line for line in lines if _ERROR.search(line) and "ChildFailedError" not in line]
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    words = (told or lines or ["nothing"])[-1]
    return f"its trainer ended with {how} and said: {words[:300]}"


def _log(folder: Path, start: int = 0) -> str:
    path = folder / LOG
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode("utf-8", errors="replace")
