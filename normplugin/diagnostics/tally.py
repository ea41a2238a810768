"""Sums and maxima of one update: kept on the device, reduced over ranks, read in one transfer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from normplugin.diagnostics.mapping import Place


class Key(NamedTuple):
    """One number. ``kind``: ``mean`` (sum over weight), ``norm`` (root of a sum), ``max``, ``min``.

    Means and extrema are the same however many ranks hold a copy; of a norm's terms, each may be
    added on one rank only.
    """

    place: Place
    name: str
    kind: str


class Tally:
    """The numbers of one update.

    Args:
        device: Where sums are kept.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._sums: dict[Key, Tensor] = {}
        self._weights: dict[Key, Tensor] = {}
        self._tops: dict[Key, Tensor] = {}

    def add(self, key: Key, value: Tensor, weight: Tensor | float = 1.0) -> None:
        """Add a scalar and its weight to a mean or a norm."""
        if not isinstance(weight, Tensor):
            weight = torch.full((), weight, dtype=torch.float64, device=self._device)
        self._sums[key] = self._sums.get(key, 0.0) + value.double()
        self._weights[key] = self._weights.get(key, 0.0) + weight.double()

    def extend(self, key: Key, value: Tensor) -> None:
        """Take a scalar into a maximum or a minimum."""
        top = (-value if key.kind == "min" else value).double()
        self._tops[key] = torch.maximum(self._tops[key], top) if key in self._tops else top

    def read(self, keys: Sequence[Key]) -> dict[Key, float | None]:
        """Reduce over all ranks, which must name the same keys, and return every number.

        None: nothing was added on any rank.
        """
        summed = [key for key in keys if key.kind in ("mean", "norm")]
        topped = [key for key in keys if key.kind in ("max", "min")]
        sums = self._stack(self._sums, summed, 0.0)
        weights = self._stack(self._weights, summed, 0.0)
        tops = self._stack(self._tops, topped, -math.inf)
        packed = torch.cat([sums, weights])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(packed)
            dist.all_reduce(tops, op=dist.ReduceOp.MAX)
        numbers = torch.cat([packed, tops]).tolist()
        n = len(summed)
        values: dict[Key, float | None] = {}
        for i, key in enumerate(summed):
            values[key] = _finish(key.kind, numbers[i], numbers[n + i])
        for key, top in zip(topped, numbers[2 * n :], strict=True):
            values[key] = None if top == -math.inf else (-top if key.kind == "min" else top)
        return {key: values[key] for key in keys}

    def _stack(self, found: dict[Key, Tensor], keys: Sequence[Key], empty: float) -> Tensor:
        nothing = torch.full((), empty, dtype=torch.float64, device=self._device)
        return torch.stack([found.get(key, nothing) for key in keys] or [nothing])[: len(keys)]


def _finish(kind: str, total: float, weight: float) -> float | None:
    if weight == 0.0:
        return None
    return total / weight if kind == "mean" else math.sqrt(total)


def shared_keys(keys: Sequence[Key]) -> list[Key]:
    """Return the keys of all ranks, in one order."""
    everywhere = set(keys)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        found: list[list[Key]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, list(keys))
        everywhere = {Key(Place(*key[0]), *key[1:]) for rank in found for key in rank}
    return sorted(everywhere, key=_order)


def _order(key: Key):
    stack, layer, part = key.place
    return stack, layer is None, layer or 0, part, key.name
