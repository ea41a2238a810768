"""What every suite does with its times: measure, print the table, make the records."""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.records import Row, percentiles
from benchmarks.tables import milliseconds, ratio, table
from benchmarks.timing import CPU, Runner, Times, interleave, spread

MODES = ("forward", "backward", "step")


@dataclass(frozen=True)
class Place:
    """The columns that all records of one case share."""

    case: str
    framework: str
    shape: str
    dtype: str

    def row(self, scheme: str, mode: str, metric: str, unit: str, values, moved: str = "") -> Row:
        """A record; ``values`` is a sample or a count."""
        head = (self.case, scheme, self.framework, mode, metric, unit, self.shape, self.dtype)
        shares = percentiles(values)
        return Row(*head, shares["p20"], shares["p50"], shares["p80"], moved)


def measure(name: str, runners: Mapping[str, Runner], seconds: float) -> Times:
    """Time all variants of a case in turn, with a progress bar on stderr."""
    with progress(name) as tick:
        return interleave(runners, seconds, tick=tick)


class progress:
    """A bar that is told the fraction done; without tqdm, nothing."""

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> Callable[[float], None]:
        """Return the function that takes the fraction."""
        try:
            from tqdm import tqdm
        except ImportError:  # gpu_check needs torch only
            self._bar = None
            return lambda done: None
        shown = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
        bar = self._bar = tqdm(total=1.0, desc=self._name, bar_format=shown, file=sys.stderr)
        return lambda done: bar.update(min(done, 1.0) - bar.n) and None

    def __exit__(self, *error) -> None:
        if self._bar is not None:
            self._bar.close()


def print_times(title: str, times: Times, stock: str) -> None:
    """Print one line per variant: the step's time, and its modes' ratios to the baseline's."""
    lines = []
    for name, laps in times.seconds.items():
        ratios = [ratio(times.ratio(name, stock, mode)) for mode in (*MODES, "step" + CPU)]
        quiet = f"{times.quiet_ratio(name, stock, 'step' + CPU):.3f}"
        lines.append([name, milliseconds(spread(laps["step"])), *ratios, quiet])
    rounds = len(times.seconds[stock]["step"])
    shares = [f"{mode} / stock" for mode in MODES]
    header = ["variant", "step, ms (p20..p80)", *shares, "step, CPU time", "its p20s"]
    print(f"\nTimes, {title}, {rounds} rounds; ratio: median of the rounds'")
    print(f"ratios to {stock} [95 % interval of that median]\n")
    print(table(header, lines))


def time_rows(place: Place, times: Times, baselines: Sequence[str]) -> list[Row]:
    """Return the records of all variants, modes and clocks."""
    rows = []
    for name, mode, kind in itertools.product(times.seconds, MODES, ("", CPU)):
        prefix = "cpu_" if kind else ""
        taken = spread(times.seconds[name][mode + kind])
        rows.append(place.row(name, mode, prefix + "time", "s", taken))
        for baseline in baselines:
            share = times.ratio(name, baseline, mode + kind)
            rows.append(place.row(name, mode, prefix + "ratio", f"/ {baseline}", share))
    return rows


def be_quiet() -> None:
    """The frameworks log and warn while they build; the tables are what is wanted."""
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
