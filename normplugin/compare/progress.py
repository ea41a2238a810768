"""Progress over the whole comparison, with the time left: a bar, or lines where there is none."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

_SECONDS = 30.0  # between two lines


class Progress:
    """Updates done of all the runs' updates.

    Args:
        runs: Number of runs.
        updates: Of every run.
    """

    def __init__(self, runs: int, updates: int):
        self.runs, self.updates = runs, updates
        self.number, self.label, self.done = 0, "", 0
        self.worked = 0  # updates of this session's runs that are over
        self.first = -1  # update at which this session took up the run
        self.shown = time.monotonic()
        self.started = self.shown
        # disable=None: no bar where stderr is not a terminal.
        self.bar = tqdm(total=runs * updates, unit="update", disable=None, dynamic_ncols=True)

    def begin(self, label: str) -> None:
        """The next run."""
        self.number, self.label, self.done, self.first = self.number + 1, label, 0, -1
        self.bar.set_description(f"[{self.number}/{self.runs}] {label}")

    def advance(self, update: int, loss: float) -> None:
        """The run has come to an update."""
        if self.first < 0:
            self.first = update
        self.done = update
        self.bar.set_postfix({"loss": f"{loss:.3f}"}, refresh=False)
        self.bar.update((self.number - 1) * self.updates + update - self.bar.n)
        if self.bar.disable and time.monotonic() - self.shown > _SECONDS:
            self.say(f"{update}/{self.updates} updates, loss {loss:.3f}, {self._left()}")

    def end(self, what: str, earlier: bool = False) -> None:
        """The run is over."""
        self.worked += 0 if earlier else max(0, self.done - max(self.first, 0))
        self.first = self.done = self.updates
        self.bar.update(self.number * self.updates - self.bar.n)
        left = "" if self.number == self.runs else f"; {self._left()}"
        self.say(f"{what}{left}")

    def say(self, what: str) -> None:
        """Write a line about the run."""
        self.shown = time.monotonic()
        tqdm.write(f"[{self.number}/{self.runs}] {self.label}: {what}", file=sys.stderr)

    def close(self) -> None:
        """Leave the terminal to others."""
        self.bar.close()

    def _left(self) -> str:
        """At the speed of this session, start-up and validation included."""
        worked = self.worked + max(0, self.done - max(self.first, 0))
        left = (self.runs - self.number + 1) * self.updates - self.done
        if not worked:
            return "time left unknown"
        seconds = (time.monotonic() - self.started) / worked * left
        return f"about {tqdm.format_interval(seconds)} left"
