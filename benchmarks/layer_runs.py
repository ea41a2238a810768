"""A single layer, of either framework: its timed run, and what autograd keeps of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.timing import Laps, Runner, Watch

Forward = Callable[[Tensor], Tensor]


def forward_backward(
    module: nn.Module, forward: Forward, x: Tensor, wait: Callable[[], object] = lambda: None
) -> Runner:
    """Forward and backward; the gradients of input and parameters are taken."""
    dy = torch.randn_like(x)

    def run() -> Laps:
        module.zero_grad()
        x.grad = None
        watch = Watch(wait)
        y = forward(x)
        watch.lap("forward")
        y.backward(dy)
        watch.lap("backward")
        return watch.laps

    return run


def per_token(kept: Callable[[int], float], length: int = 16) -> tuple[float, float]:
    """Split what ``kept(batch)`` says into a part per token and a part whatever the tokens.

    Two batch sizes tell the two apart.
    """
    few, many = kept(2), kept(4)
    slope = (many - few) / (2 * length)
    return slope, few - slope * 2 * length
