"""Is a difference between seeds' losses one, or chance: Welch's t-test at 5 %."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

_LEVEL = 0.05


def can_test() -> bool:
    """Whether scipy, which has the test, is installed."""
    return importlib.util.find_spec("scipy") is not None


def welch(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the two-sided p-value for equal means of two samples of at least two each."""
    from scipy import stats

    if len(set(ours)) == len(set(theirs)) == 1:  # no spread to test against
        return math.nan
    return float(stats.ttest_ind(ours, theirs, equal_var=False).pvalue)


def verdict(ours: Sequence[float], theirs: Sequence[float]) -> tuple[str, float | None]:
    """Return what can be said of losses against the baseline's, and the p-value."""
    if not ours or not theirs:
        return "failed", None
    if min(len(ours), len(theirs)) == 1:
        return "one seed", None
    if not can_test():
        return "not tested", None
    p = welch(ours, theirs)
    if not p < _LEVEL:
        return "no difference shown", None if math.isnan(p) else p
    return ("better" if sum(ours) / len(ours) < sum(theirs) / len(theirs) else "worse"), p
