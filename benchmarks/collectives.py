"""Counts collectives where torch dispatches them, whichever name the caller imported them by."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Traffic:
    """How many collectives, and the bytes that each rank sends for them by the ring algorithm."""

    calls: int = 0
    sent: int = 0

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls - other.calls, self.sent - other.sent)


class CollectiveCounter(TorchDispatchMode):
    """A context in which every collective of the process is counted.

    A ring sends (n - 1) / n of the whole tensor per rank for a gather or a reduce-scatter, twice
    that for an all-reduce. The whole tensor is the larger of what goes in and what comes out.

    Raises:
        NotImplementedError: For a collective whose traffic is not known here.
    """

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world = world
        self.traffic = Traffic()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count, and run."""
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.__name__.partition(".")[0].strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args) -> None:
        if name == "wait_tensor":
            return
        rounds = {"allreduce": 2, "allgather": 1, "allgather_base": 1, "reduce_scatter_base": 1}
        if name not in rounds:
            raise NotImplementedError(f"collective: got {name}; known are {', '.join(rounds)}")
        whole = max(_bytes(arg) for arg in args[:2])
        sent = math.ceil(rounds[name] * whole * (self.world - 1) / self.world)
        self.traffic = Traffic(self.traffic.calls + 1, self.traffic.sent + sent)


def _bytes(argument) -> int:
    tensors = [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
