"""Learned scales: the head scale and where it can be folded.

Head scale before the output projection (Shleifer et al. 2021, arXiv:2110.09456, section 2):

    concat(g_1 h_1, ..., g_n h_n) W_O = concat(h_1, ..., h_n) diag(g) W_O

so scaling the columns of the projection that belong to head i costs no activation and no pass
over the tokens. Upstream fairseq scales after the projection, which is another function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn


def expand_head_scale(head_scale: Tensor, width: int) -> Tensor:
    """Return one factor per channel, shape (width,), from one per head, shape (H,)."""
    return head_scale.repeat_interleave(width // head_scale.numel())


def scale_heads(x: Tensor, head_scale: Tensor) -> Tensor:
    """Return x with its i-th slice of D/H channels times g_i.

    Shapes: x (..., D), head_scale (H,) -> (..., D).
    """
    return x * expand_head_scale(head_scale, x.size(-1))


class HeadScaledLinear(nn.Linear):
    """An output projection whose weight carries the head scale.

        y = W diag(g) x + b

    ``weight`` reads as W diag(g), so code that takes the weight and never calls the module (the
    fused attention path) computes the same function as code that calls it. What is stored,
    trained and saved under the name ``weight`` is W.

    Shapes: x (..., D) -> (..., D).
    State:  weight (D, D), bias (D,), head_scale (H,), starting at 1.
    """

    __jit_unused_properties__ = ("weight",)  # torch.jit.trace would compile it
    if TYPE_CHECKING:  # and read this
        head_scale: nn.Parameter

    def add_head_scale(self, n_heads: int) -> None:
        """Create the scale; call once, after the linear exists."""
        self.head_scale = nn.Parameter(torch.ones(n_heads))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The effective weight W diag(g), shape (D, D)."""
        # Sharding wrappers replace the parameter by a plain view.
        stored = self._parameters.get("weight", self.__dict__.get("_weight_view"))
        if stored is None:
            raise AttributeError("weight")
        scale = getattr(self, "head_scale", None)
        return stored if scale is None else stored * expand_head_scale(scale, self.in_features)

    @weight.setter
    def weight(self, value: Tensor) -> None:
        self.__dict__["_weight_view"] = value
