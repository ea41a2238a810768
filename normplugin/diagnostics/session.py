"""Which updates of a run are measured, and what becomes of the numbers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

from normplugin.diagnostics import records
from normplugin.diagnostics.batches import BatchHash
from normplugin.diagnostics.mapping import ModelMap, Place
from normplugin.diagnostics.probe import Probe
from normplugin.diagnostics.quantities import first_over_last, headroom_bits
from normplugin.diagnostics.records import BATCHES, Record
from normplugin.diagnostics.tally import Key

Scalars = Callable[[dict[str, float], int], None]
RUN = ("", None, "run")
_HEADROOM = {"max_abs": "headroom_bits", "raw_max_abs": "raw_headroom_bits"}


class Session:
    """The first update, every ``interval``-th one, and the next good one where one overflowed.

    Args:
        model_map: What is measured.
        interval: In updates.
        path: Where rank 0 writes.
        scalars: Also given the numbers, by name, and the update (tensorboard).
    """

    def __init__(
        self, model_map: ModelMap, interval: int, path: Path, scalars: Scalars | None = None
    ):
        self.probe = Probe(model_map)
        self.interval, self.path, self.scalars = interval, path, scalars
        self.skipped = 0
        self._owed = False
        if self._writes:
            records.append(path, [])  # fails now where it would fail later

    @contextlib.contextmanager
    def update(self, number: int) -> Iterator[bool]:
        """Around one update: yields whether it is measured."""
        due = self._owed or number == 1 or number % self.interval == 0
        try:
            if due:
                self.probe.attach()
            yield due
        finally:
            self.probe.detach()

    def close(
        self, number: int, measured: bool, done: bool, batches: BatchHash | None = None
    ) -> None:
        """Behind an update: write what was measured, or count it as skipped (overflow).

        ``batches`` has seen all that came since the record before.
        """
        self.skipped += not done
        if not measured:
            return
        self._owed = not done
        if not done:
            return
        values = self.probe.read()
        if self._writes or self.scalars is not None:
            found = summarize(values, number, self.skipped)
            hashes = [Record(number, *RUN, BATCHES, batches.take(number))] if batches else []
            if self._writes:
                records.append(self.path, [*found, *hashes])
            if self.scalars is not None:
                self.scalars(as_scalars(found), number)

    @property
    def _writes(self) -> bool:
        return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def summarize(values: dict[Key, float | None], update: int, skipped: int = 0) -> list[Record]:
    """Return the records of one update, those that follow from others among them.

    The gradients of a layer that no micro-batch entered are null, whatever zeros its tensors hold.
    """
    entered = {
        key.place[:2]: value is not None
        for key, value in values.items()
        if key.place.part == "stream" and key.name == "variance"
    }
    found = []
    for key, value in values.items():
        if key.name.startswith("gradient") and key.place.layer:
            value = value if entered.get(key.place[:2], True) else None
        found.append(Record(update, *key.place, key.name, value))
        if key.name in _HEADROOM:
            bits = None if value is None else headroom_bits(value)
            found.append(Record(update, *key.place, _HEADROOM[key.name], bits))
    found += [Record(update, *place, name, x) for place, name, x in _ratios(found)]
    squares = [r.value**2 for r in found if _part_of_total(r) and r.value is not None]
    found.append(Record(update, *RUN, "gradient_norm", math.sqrt(sum(squares))))
    found.append(Record(update, *RUN, "skipped_updates", skipped))
    return found


def as_scalars(found: list[Record]) -> dict[str, float]:
    """Return the numbers by names that tensorboard groups: one chart group per quantity."""
    return {f"{r.part}.{r.name}/{_label(r)}": r.value for r in found if r.value is not None}


def _label(record: Record) -> str:
    layer = "all" if record.layer is None else f"{record.layer:02d}"
    return f"{record.stack or 'run'}.{layer}"


def _ratios(found: list[Record]) -> Iterator[tuple[Place, str, float | None]]:
    """First over last layer of the mean absolute gradient of the second FFN weight, per stack."""
    by_stack: dict[str, list[Record]] = {}
    for record in found:
        if (record.part, record.name) == ("fc2", "gradient_mean_abs"):
            by_stack.setdefault(record.stack, []).append(record)
    for stack, layers in by_stack.items():
        layers.sort(key=lambda record: record.layer or 0)
        ratio = first_over_last([record.value for record in layers])
        yield Place(stack, None, "fc2"), "gradient_mean_abs_first_over_last", ratio


def _part_of_total(record: Record) -> bool:
    return record.name == "gradient_norm" and record.part != "fc2"
