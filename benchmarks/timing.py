"""Interleaved timing: every variant once per round, so that a slow moment meets all alike."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Laps = Mapping[str, float]  # mode -> seconds
Runner = Callable[[], Laps]


CPU = " cpu"  # after a mode's name: the process's CPU time, blind to other programs' turns


class Watch:
    """Seconds since the last lap, by name, on the wall and of CPU; ``step`` is the sum of all.

    Args:
        wait: Called before a clock is read: a GPU's work is done when it returns.
    """

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.laps: dict[str, float] = {}
        self._wait = wait
        wait()
        self._start = self._last = _clocks()

    def lap(self, name: str) -> None:
        """End the current lap."""
        self._wait()
        now = _clocks()
        for kind, reading in now.items():
            self.laps[name + kind] = reading - self._last[kind]
            self.laps["step" + kind] = reading - self._start[kind]
        self._last = now


def _clocks() -> dict[str, float]:
    return {"": time.perf_counter(), CPU: time.process_time()}


@dataclass(frozen=True)
class Spread:
    """Percentiles of a sample, and a 95 % interval of its median by order statistics."""

    p20: float
    p50: float
    p80: float
    low: float
    high: float
    n: int


def spread(values: list[float]) -> Spread:
    """Summarise a sample."""
    ordered, n = sorted(values), len(values)
    margin = 0.98 * math.sqrt(n)
    low, high = max(0, math.floor(n / 2 - margin)), min(n - 1, math.ceil(n / 2 + margin) - 1)
    p20, p50, p80 = (_quantile(ordered, q) for q in (0.2, 0.5, 0.8))
    return Spread(p20, p50, p80, ordered[low], ordered[max(low, high)], n)


def _quantile(ordered: list[float], q: float) -> float:
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@dataclass
class Times:
    """The seconds of every variant and mode; entry i of each list belongs to round i."""

    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, variant: str, laps: Laps) -> None:
        """Append one round."""
        for mode, value in laps.items():
            self.seconds.setdefault(variant, {}).setdefault(mode, []).append(value)

    def ratio(self, variant: str, baseline: str, mode: str) -> Spread:
        """The variant's time over the baseline's in the same round."""
        pairs = zip(self.seconds[variant][mode], self.seconds[baseline][mode], strict=True)
        return spread([mine / stock for mine, stock in pairs])

    def quiet_ratio(self, variant: str, baseline: str, mode: str) -> float:
        """The ratio of the p20 of either: other programs only ever add time."""
        mine, stock = (spread(self.seconds[name][mode]).p20 for name in (variant, baseline))
        return mine / stock


def interleave(
    runners: Mapping[str, Runner],
    budget: float,
    least: int = 3,
    tick: Callable[[float], None] = lambda done: None,
) -> Times:
    """Run all variants in rounds, in a new order each round, until the budget is spent.

    Args:
        runners: What to run; each call returns its laps.
        budget: Seconds, warm-up left out.
        least: Rounds to run whatever the budget.
        tick: Called after every round with the fraction done.
    """
    for runner in runners.values():
        runner()
    times = Times({name: {} for name in runners})  # in the order of the runners
    names, shuffle = list(runners), random.Random(0).shuffle
    spent, rounds = 0.0, 0
    with _no_collection():
        while spent < budget or rounds < least:
            start = time.perf_counter()
            shuffle(names)
            for name in names:
                times.add(name, runners[name]())
            gc.collect()
            spent, rounds = spent + time.perf_counter() - start, rounds + 1
            tick(min(rounds / least, spent / budget if budget else 1.0))
    return times


@contextlib.contextmanager
def _no_collection():
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
