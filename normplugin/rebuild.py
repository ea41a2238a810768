"""Give a linear an input that autograd does not keep: it is made again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def rebuild_input(module: Callable[[Tensor], Any], x: Tensor, rebuild: Callable[[], Tensor]) -> Any:
    """Return module(x), with x made again by ``rebuild`` where the backward pass needs it.

    A linear keeps its input for the gradient of its weight. Where that input is a cheap function
    of something kept anyway, this saves one activation. It works for any linear (tensor-parallel,
    fused, Transformer Engine): none of its code is replaced. A linear that keeps something else,
    say a cast copy, keeps it still.

    Args:
        module: Any function of one tensor.
        x: Its input, contiguous.
        rebuild: Returns the value of x, in its dtype; holds on to what is kept anyway, detached.
    """
    address, size = x.data_ptr(), x.numel()

    def pack(kept: Tensor) -> Any:
        same = kept.data_ptr() == address and kept.numel() == size and kept.is_contiguous()
        return kept.shape if same else kept

    def unpack(packed: Any) -> Tensor:
        if not isinstance(packed, torch.Size):
            return packed
        with torch.no_grad():
            return rebuild().view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return module(x)
