"""Which batches a run was given, as one number per record: equal numbers, equal token ids."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class BatchHash:
    """CRC-32 of the integers (token ids, lengths) of all batches since the record before.

    Of this rank's batches, where there are several.

    Args:
        interval: Updates between two records.
        begun: Updates done when the first batch comes.
    """

    def __init__(self, interval: int, begun: int):
        self.interval = interval
        self._since, self._value = begun, 0

    def add(self, batches: Any) -> None:
        """Take the batches of one update: any nesting of lists, dicts and tensors of integers."""
        for tensor in _integers(batches):
            self._value = zlib.crc32(tensor.cpu().contiguous().numpy(), self._value)

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches as they are asked for, and `add` them."""
        for batch in batches:
            self.add(batch)
            yield batch

    def take(self, update: int) -> int | None:
        """Return the number for a record, and begin again.

        None where the process did not see all of them, or a record was put off by an overflow.
        """
        whole = all(place <= 1 or place % self.interval == 0 for place in (self._since, update))
        value = self._value if whole else None
        self._since, self._value = update, 0
        return value


def _integers(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if not batch.is_floating_point() and batch.dtype != torch.bool:  # masks can be large
            yield batch
    elif isinstance(batch, Mapping):
        for name in sorted(batch):
            yield from _integers(batch[name])
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _integers(part)
