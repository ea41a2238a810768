"""From finished runs to the numbers of a comparison; what each one is stands in `results`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from normplugin.compare import fair, verdict
from normplugin.compare.frameworks import DIAGNOSTICS, Dataset
from normplugin.compare.plan import Job, Settings
from normplugin.compare.record import batches
from normplugin.compare.results import FINISHED, Arm, Loss, LossAt, Point, Run, mean_curve
from normplugin.compare.run import Done
from normplugin.data import units

_STEADY = 0.1  # relative change of speed inside a run, or of CPU share between runs


@dataclass(frozen=True)
class Entry:
    """A job and how it ended."""

    job: Job
    done: Done


def findings(entries: Sequence[Entry], settings: Settings, data: Dataset) -> list[fair.Finding]:
    """Return what speaks against ranking the finished runs."""
    finished = [(e.job, e.done.record) for e in entries if e.done.record]
    found = fair.compare([(job, record.facts) for job, record in finished])
    if settings.ramp:
        found += fair.compare(_first_batches(entries))
    whole = data.valid.predicted()
    if settings.framework == "fairseq" and settings.kind != "mlm":
        found += [
            fair.Finding(
                "scored tokens",
                f"scored tokens: got {record.scored:,} for {job.name!r}; the validation text has "
                f"{whole:,}",
            )
            for job, record in finished
            if record.scored != whole
        ]
    base = next((record.parameters for job, record in finished if job.arm.upstream), None)
    if base is not None:
        checks = (fair.check_parameters(j, settings, r.parameters, base) for j, r in finished)
        found += [finding for finding in dict.fromkeys(checks) if finding]
    return found


def _first_batches(entries: Sequence[Entry]) -> list[tuple[Job, dict[str, Any]]]:
    """Return what runs tell that a growing learning rate ended: batches, as far as all went."""
    told = [(entry.job, batches(entry.job.folder / DIAGNOSTICS)) for entry in entries]
    common = min((len(numbers) for _, numbers in told), default=0)
    return [(job, {"batches": numbers[:common]}) for job, numbers in told]


@dataclass(frozen=True)
class _Group:
    """An arm's runs, its best learning rate, and its mean validation curve there."""

    entries: list[Entry]
    lr: float | None
    curve: list[Point]

    @property
    def parameters(self) -> int | None:
        return next((e.done.record.parameters for e in self.entries if e.done.record), None)


def arms(entries: Sequence[Entry], settings: Settings, data: Dataset) -> list[Arm]:
    """Return every arm's numbers, the baseline first."""
    groups = []
    for name in dict.fromkeys(entry.job.arm.name for entry in entries):
        mine = [entry for entry in entries if entry.job.arm.name == name]
        mine.sort(key=lambda entry: (entry.job.lr, entry.job.seed))
        lr = _best_lr(mine, settings)
        groups.append(_Group(mine, lr, mean_curve([it.done.run for it in mine if it.job.lr == lr])))
    common = _common_end([group.curve for group in groups if group.curve])
    return [_arm(group, groups[0], common, settings, data) for group in groups]


def _arm(
    group: _Group, base: _Group, common: LossAt | None, settings: Settings, data: Dataset
) -> Arm:
    arm = group.entries[0].job.arm
    said, p_value = _verdict(group, base, settings)
    loss = _loss(_losses(group.entries, group.lr))
    per_byte, per_token, per_word = _units(loss, settings, data)
    known = group.parameters is not None and base.parameters is not None
    reached = _reached(group.curve, base.curve[-1].loss) if group.curve and base.curve else None
    return Arm(
        name=arm.name,
        scheme=arm.placement.name if arm.placement else None,
        options=[*arm.options],
        parameters=group.parameters,
        parameter_delta=group.parameters - base.parameters if known else None,  # type: ignore[operator]
        runs=[entry.done.run for entry in group.entries],
        best_lr=group.lr,
        loss=loss,
        loss_at=_loss_at(group.curve, common) if group.curve and common else None,
        bits_per_byte=per_byte,
        token_perplexity=per_token,
        word_perplexity=per_word,
        speed_ratio=_ratio(group, base, lambda run: run.tokens_per_second),
        speed_in_doubt=_in_doubt(group, base),
        memory_ratio=_ratio(group, base, lambda run: run.peak_memory_bytes),
        updates_to_baseline_loss=reached and reached[0],
        seconds_to_baseline_loss=reached and reached[1],
        p_value=p_value,
        verdict=said,
    )


def _verdict(group: _Group, base: _Group, settings: Settings) -> tuple[str, float | None]:
    ours, theirs = _scores(group, settings), _scores(base, settings)
    if group is base:
        return ("baseline" if ours else "failed"), None
    return verdict.verdict(ours, theirs)


def _best_lr(group: Sequence[Entry], settings: Settings) -> float | None:
    """The rate with the lowest mean loss; only rates with which every seed finished count."""
    means = {
        lr: statistics.fmean(_losses(group, lr))
        for lr in settings.lrs
        if len(_losses(group, lr)) == len(settings.seeds)
    }
    return min(means, key=means.__getitem__) if means else None


def _losses(group: Sequence[Entry], lr: float | None) -> list[float]:
    done = [e.done for e in group if e.job.lr == lr and e.done.run.status == FINISHED]
    return [it.record.loss for it in done if it.record]


def _scores(group: _Group, settings: Settings) -> list[float]:
    """What the verdict is about, lower is better: losses, or updates survived on a ramp."""
    if not settings.ramp:
        return _losses(group.entries, group.lr)
    return [-float(e.done.run.ramp.survived) for e in group.entries if e.done.run.ramp]


def _loss(losses: Sequence[float]) -> Loss | None:
    if not losses:
        return None
    std = statistics.stdev(losses) if len(losses) > 1 else None
    return Loss(statistics.fmean(losses), std, len(losses))


def _units(
    loss: Loss | None, settings: Settings, data: Dataset
) -> tuple[float | None, float | None, float | None]:
    """Return bits per byte, and perplexity per token and per word."""
    if loss is None:
        return None, None, None
    tokens = data.valid.predicted()
    per = units.from_nats(loss.mean * tokens, tokens, data.valid.words, data.valid.bytes)
    if settings.kind == "mlm":  # it is scored on the masked tokens: nothing is known per byte
        return None, _finite(per.token_perplexity), None
    return per.bits_per_byte, _finite(per.token_perplexity), _finite(per.word_perplexity)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _common_end(curves: Sequence[Sequence[Point]]) -> LossAt | None:
    """Return the most updates, tokens and seconds that every arm has had."""
    if not curves:
        return None
    ends = [curve[-1] for curve in curves]
    return LossAt(
        min(end.update for end in ends),
        min(end.tokens for end in ends),
        min(end.seconds for end in ends),
    )


def _loss_at(curve: Sequence[Point], common: LossAt) -> LossAt:
    return LossAt(
        _between([float(p.update) for p in curve], curve, common.updates),
        _between([float(p.tokens) for p in curve], curve, common.tokens),
        _between([p.seconds for p in curve], curve, common.seconds),
    )


def _between(places: Sequence[float], curve: Sequence[Point], at: float) -> float:
    """Return the loss at a place between two validations, on a straight line; the ends hold."""
    for number in range(1, len(curve)):
        if at <= places[number]:
            left, right = places[number - 1], places[number]
            share = max(0.0, (at - left) / (right - left)) if right > left else 1.0
            before, after = curve[number - 1].loss, curve[number].loss
            return before + share * (after - before)
    return curve[-1].loss


def _reached(curve: Sequence[Point], loss: float) -> tuple[float, float] | None:
    """Return updates and seconds until a curve first came down to a loss."""
    if curve[0].loss <= loss:
        return float(curve[0].update), curve[0].seconds
    for before, after in itertools.pairwise(curve):
        if after.loss <= loss:
            share = (before.loss - loss) / (before.loss - after.loss)
            updates = before.update + share * (after.update - before.update)
            return updates, before.seconds + share * (after.seconds - before.seconds)
    return None


def _ratio(group: _Group, base: _Group, of: Callable[[Run], float | None]) -> float | None:
    """Return the ratio of the medians over all runs that finished, at any learning rate."""
    ours, theirs = ([v for run in _ended(it) if (v := of(run))] for it in (group, base))
    return statistics.median(ours) / statistics.median(theirs) if ours and theirs else None


def _ended(group: _Group) -> list[Run]:
    return [entry.done.run for entry in group.entries if entry.done.record]


def _in_doubt(group: _Group, base: _Group) -> bool:
    shares = [run.cpu_share for run in _ended(base) if run.cpu_share]
    usual = statistics.median(shares) if shares else None
    return any(_unsteady(run, usual) for run in _ended(group))


def _unsteady(run: Run, usual_share: float | None) -> bool:
    """Whether a run's speed, or its share of the CPU against the baseline's, moved too much."""
    if run.tokens_per_second and run.quartiles:
        if run.quartiles[-1] - run.quartiles[0] > _STEADY * run.tokens_per_second:
            return True
    return bool(usual_share and run.cpu_share and abs(run.cpu_share / usual_share - 1.0) > _STEADY)
