"""What a reader must know before concluding anything."""

from __future__ import annotations

from collections.abc import Sequence

from normplugin.compare.plan import Settings
from normplugin.compare.results import FINISHED, Arm, Run
from normplugin.compare.verdict import can_test


def cautions(arms: Sequence[Arm], settings: Settings) -> list[str]:
    """Return one sentence per caution."""
    return [
        *_seeds(arms, settings),
        *_rates(arms, settings),
        *_ended(arms),
        *_speed(arms, settings),
        f"{settings.tokens:,} tokens at size {settings.size!r}: nothing here speaks of larger "
        "models or longer runs.",
    ]


def _seeds(arms: Sequence[Arm], settings: Settings) -> list[str]:
    if len(settings.seeds) == 1:
        return ["one seed per arm: differences of this size are not a result."]
    tests = sum(arm.p_value is not None for arm in arms)
    said = [] if can_test() else ["scipy is not installed: no verdict was tested. Install it."]
    if tests > 1:
        said.append(
            f"{tests} tests at 5% each: one of them may call chance a difference more often "
            "than that."
        )
    return said


def _rates(arms: Sequence[Arm], settings: Settings) -> list[str]:
    if settings.ramp:
        return ["the learning rate grew all the time: these losses are of no trained model."]
    if len(settings.lrs) == 1:
        return ["one learning rate and no sweep: the best one differs between placements."]
    ends = {min(settings.lrs), max(settings.lrs)}
    edge = [arm.name for arm in arms if arm.best_lr in ends]
    chosen = "each arm's learning rate was chosen on the same validation text that it is judged on."
    if not edge:
        return [chosen]
    more = f"the best learning rate of {', '.join(edge)} is at the end of the sweep: widen it."
    return [chosen, more]


def _ended(arms: Sequence[Arm]) -> list[str]:
    """Return a sentence per arm, learning rate and way to end, whatever the number of seeds."""
    groups: dict[tuple[str, float, str], list[Run]] = {}
    for arm in arms:
        for run in arm.runs:
            if run.status != FINISHED and not run.ramp:
                groups.setdefault((arm.name, run.lr, run.status), []).append(run)
    return [_failure(*key, runs) for key, runs in groups.items()]


def _failure(arm: str, lr: float, status: str, runs: Sequence[Run]) -> str:
    several = "s" * (len(runs) > 1)
    seeds = ", ".join(str(run.seed) for run in runs)
    updates = ", ".join(str(run.stopped_at) for run in runs)
    return (
        f"{arm} at learning rate {lr:g} with seed{several} {seeds} {status} at update{several} "
        f"{updates}: {(runs[0].reason or 'no reason known').rstrip('.')}."
    )


def _speed(arms: Sequence[Arm], settings: Settings) -> list[str]:
    busy = [arm.name for arm in arms if arm.speed_in_doubt]
    emulated = settings.framework == "megatron" and settings.device == "cpu"
    said = ["speed and memory are of CUDA emulated on the CPU: nothing of a GPU's."] * emulated
    if busy:
        return [
            *said,
            f"the machine had other work during {', '.join(busy)} (speed inside a run, or CPU "
            "share against the baseline, moved by more than 10%): the speeds marked ? are not a "
            "result.",
        ]
    return [
        *said,
        "the arms ran one after another: other load on the machine moves the ratio of speeds.",
    ]
