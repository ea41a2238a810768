"""May the runs be ranked, and in which numbers.

loss        nats per target token of the validation split, each document's eos included
per byte    the same loss over the bytes of the raw text: comparable between tokenizers
tokens/s    target tokens (no padding) over wall time, the median of the log intervals after
            the first quarter of them; start-up and validation are left out
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normplugin.compare.run import Run
from normplugin.data import units
from normplugin.data.encode import SplitCounts
from normplugin.errors import CompareError

_WARM_UP_SHARE = 4  # one interval in four
_STEADY = 0.1  # relative change of speed inside a run, or of CPU share between runs


@dataclass(frozen=True)
class Numbers:
    """One arm in the units of the report.

    Attributes:
        arm: Its name.
        loss: Validation loss in nats per token.
        bits_per_byte: The same loss per byte of raw text.
        token_perplexity: exp(loss).
        word_perplexity: The same per white-space separated word.
        parameters: Trained parameters.
        tokens_per_second: See the module.
        quartiles: Of the tokens per second of the measured intervals.
        peak_memory_bytes: Of the process.
        cpu_share: CPU seconds per second of the process.
    """

    arm: str
    loss: float
    bits_per_byte: float
    token_perplexity: float
    word_perplexity: float | None
    parameters: int
    tokens_per_second: float
    quartiles: tuple[float, float]
    peak_memory_bytes: int
    cpu_share: float

    def doubtful(self, baseline: Numbers) -> bool:
        """Whether the machine was too busy for the ratio of the speeds to mean something."""
        low, high = self.quartiles
        moved = abs(self.cpu_share / baseline.cpu_share - 1.0)
        return high - low > _STEADY * self.tokens_per_second or moved > _STEADY


def mismatches(facts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Return one sentence per fact in which an arm differs from the first."""
    (baseline, expected), *others = facts
    found = []
    for arm, got in others:
        for name in [*expected, *(key for key in got if key not in expected)]:
            ours, theirs = got.get(name), expected.get(name)
            if ours != theirs:
                where, ours, theirs = _divergence(ours, theirs)
                found.append(
                    f"{name}: got {ours} for arm {arm!r}; {theirs} for the baseline "
                    f"{baseline!r}{where}"
                )
    return found


def _divergence(ours: Any, theirs: Any) -> tuple[str, Any, Any]:
    """Return where two lists diverge first, and what stands there."""
    if not (isinstance(ours, list) and isinstance(theirs, list) and ours and theirs):
        return "", ours, theirs
    if not isinstance(ours[0], list) or not isinstance(theirs[0], list):
        return "", ours, theirs
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return f", first at update {min(mine[0], other[0]):g}", mine[1], other[1]
    return ", in its length", f"{len(ours)} log lines", f"{len(theirs)} log lines"


def unscored(runs: Sequence[Run], valid: SplitCounts) -> list[str]:
    """Return one sentence per arm that was not scored on the whole validation split, once."""
    return [
        f"scored tokens: got {run.record.facts['scored tokens']:,} for arm {run.arm!r}; the "
        f"validation split has {valid.predicted():,}"
        for run in runs
        if run.record.facts["scored tokens"] != valid.predicted()
    ]


def refuse(found: Sequence[str], allow: bool) -> None:
    """Raise `CompareError` for the first finding, unless mismatches are allowed."""
    if found and not allow:
        more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
        raise CompareError(
            f"{found[0]}{more}. Runs are ranked only when these are equal: change the arm, or "
            "pass --allow-mismatch to be warned only."
        )


def cautions(runs: Sequence[Run], numbers: Sequence[Numbers]) -> list[str]:
    """Return what a reader must know before concluding anything."""
    rates = {str(run.record.hyperparameters["learning rate"]) for run in runs}
    equal = "one learning rate for all arms and no sweep: the best one differs between placements."
    differ = "the arms have DIFFERENT learning rates and no sweep: the rate may decide the order."
    quiet = (
        "tokens/s are of one run each, the arms one after another: other load on the machine "
        "moves the ratio."
    )
    busy = [one.arm for one in numbers if one.doubtful(numbers[0])]
    noisy = (
        f"the machine had other work during {', '.join(busy)} (speed inside the run, or CPU share "
        "against the baseline, moved by more than 10%): the speeds marked ? are not a result."
    )
    return [
        "one seed per arm: differences of this size are not a result.",
        differ if len(rates) > 1 else equal,
        noisy if busy else quiet,
    ]


def numbers(run: Run, valid: SplitCounts) -> Numbers:
    """Return an arm's numbers."""
    scored = int(run.record.facts["scored tokens"])
    loss = units.from_nats(run.record.valid_bits * math.log(2.0), scored, valid.words, valid.bytes)
    speeds = measured_speeds(run.record.intervals)
    quarters = statistics.quantiles(speeds, n=4) if len(speeds) > 1 else [speeds[0]] * 3
    perplexity = loss.word_perplexity
    return Numbers(
        arm=run.arm,
        loss=loss.nats_per_token,
        bits_per_byte=loss.bits_per_byte,
        token_perplexity=loss.token_perplexity,
        word_perplexity=perplexity if math.isfinite(perplexity) else None,
        parameters=run.record.parameters,
        tokens_per_second=statistics.median(speeds),
        quartiles=(quarters[0], quarters[2]),
        peak_memory_bytes=run.peak_memory_bytes,
        cpu_share=run.cpu_seconds / run.wall_seconds,
    )


def measured_speeds(intervals: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the tokens per second of the intervals after the first quarter of them."""
    measured = intervals[len(intervals) // _WARM_UP_SHARE :]
    speeds = [line["tokens_per_second"] for line in measured if line.get("tokens_per_second")]
    if not speeds:
        raise CompareError(
            f"tokens/s: got {len(intervals)} log intervals; at least 2 are needed. "
            "Train more updates."
        )
    return speeds
