"""The design's targets, and whether a measurement reaches them."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.timing import Spread

# Statistics: mean and rstd per token of each norm that the scheme adds to Pre-LN.
FLOATS_PER_NORM = 2
ADDED_NORMS = 2


@dataclass(frozen=True)
class Target:
    """An upper limit for one variant."""

    variant: str
    against: str
    limit: float


# Ratios of step times at width 768, whole training step.
STEP_TIME_WIDTH = 768
STEP_TIME = (
    Target("normformer", "stock preln", 1.02),
    Target("normformer", "stock normformer", 1.00),
    Target("normformer recompute", "stock preln", 1.05),
    Target("periln", "stock preln", 1.02),
    Target("periln rmsnorm", "stock preln", 1.02),
)
# Saved activations beyond Pre-LN's, in d_model elements per layer and token, at every width; the
# norm statistics come on top.
SAVED_EXTRA = (
    Target("normformer", "stock preln", 1.0),
    Target("normformer recompute", "stock preln", -3.0),
    Target("periln", "stock preln", 2.0),
    Target("periln rmsnorm", "stock preln", 2.0),
)
# Collectives per layer beyond stock's with TP > 1: (forward, backward).
COLLECTIVES_EXTRA = {"preln": (0, 0), "periln": (0, 0), "postln": (0, 0), "normformer": (1, 1)}


def statistics_allowance(d_model: int) -> float:
    """The added norms' statistics, in d_model elements per token."""
    return ADDED_NORMS * FLOATS_PER_NORM / d_model


def verdict(measured: Spread | float, limit: float) -> str:
    """``reached``, ``missed``, or ``open`` where the median's interval straddles the limit."""
    if not isinstance(measured, Spread):
        return "reached" if measured <= limit + 1e-9 else "missed"
    if measured.high <= limit:
        return "reached"
    return "missed" if measured.low > limit else f"open ({measured.n} rounds)"
