"""Every quantity that is reported, defined once. Plain torch.

A stack of L layers carries the residual stream ``x_0 ... x_L``: x_0 enters the first layer (after
an embedding norm), x_l leaves layer l (before the stack's final norm, except where that norm is
the last layer's C). Layers are numbered from 1 over the whole stack.

What is a function of tokens is averaged over all tokens of an update (padding left out): those of
all its micro-batches on all ranks. Maxima are over the same tokens. Gradients are those the
optimizer would get without clipping: summed over micro-batches and ranks, normalised, unscaled.

The papers leave the estimators open; these are ours. Shapes: x (..., D), one value per token (...).
Dtype: fp32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FP16_MAX = 65504.0

# part "stream"
STREAM = {"variance": "mean", "max_abs": "max", "angular_distance": "mean"}
# parts "attention", "cross_attention", "ffn"
SUBLAYER = {
    "raw_variance": "mean",
    "raw_max_abs": "max",
    "contribution_variance": "mean",
    "contribution_max_abs": "max",
}
# the same parts, and "fc2" (the second FFN weight), "norms", "embeddings", "output"
GRADIENT = {"gradient_norm": "norm", "gradient_mean_abs": "mean"}
# the sites of normplugin.placement: "attention.output", "ffn.hidden", "attention.head_scale", ...
GAIN = {"gain_mean": "mean", "gain_min": "min", "gain_max": "max"}


def variance(x: Tensor) -> Tensor:
    """Variance of every token over its channels, biased, as LayerNorm sees it.

    v = mean_d (x_d - mean_d x_d)^2
    """
    return _wide(x).var(-1, correction=0)


def max_abs(x: Tensor) -> Tensor:
    """Largest absolute channel of every token, max_d |x_d|."""
    return _wide(torch.linalg.vector_norm(x, math.inf, dim=-1))


def headroom_bits(largest: float) -> float:
    """Bits left to fp16's largest number, log2(65504 / largest); negative where fp16 overflows."""
    return math.log2(FP16_MAX / largest) if largest > 0.0 else math.inf


def angular_distance(x: Tensor, y: Tensor) -> Tensor:
    """Angle between a token's stream before and after a layer, in units of pi.

        arccos(cos(x, y)) / pi = 2 atan2(|u - v|, |u + v|) / pi     u = x / |x|, v = y / |y|

    The right-hand side keeps its digits where the angle is small; arccos loses half of them.
    """
    u, v = (torch.nn.functional.normalize(_wide(z), dim=-1, eps=1e-30) for z in (x, y))
    angle = torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))
    return angle * (2.0 / math.pi)


def contribution(before: Tensor, after: Tensor) -> Tensor:
    """What a sublayer really does to the stream: the stream behind it less the stream before it.

        x_l = x_{l-1} + contribution(attention) + contribution(ffn)

    That is dropout(B(F(.))) where the sublayer ends with the residual add. With a residual scale
    it is (lambda - 1) x + dropout(B(F(.))), and with a residual norm (C, Post-LN) it is
    C(x + F(.)) - x: the whole change of the stream, so the sum above always holds. Beside it,
    "raw" is F(.) with its bias: before the output norm (B), dropout, residual scale and C.
    """
    return _wide(after) - _wide(before)


def square_sum(gradient: Tensor) -> Tensor:
    """Sum of squares of a gradient; the L2 norm of a part is the root of the sum over its tensors.

    ||g|| = sqrt(sum_i g_i^2)
    """
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, dtype=dtype).double().square()


def abs_sum(gradient: Tensor) -> Tensor:
    """Sum of absolute values; over the number of elements it is the mean absolute gradient.

        mean_i |g_i|

    Of part "fc2" this is NormFormer's Figure 3 (arXiv:2110.09456) over the number of elements,
    which cancels in its ratio of the first to the last layer.
    """
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, 1, dtype=dtype).double()


def first_over_last(layers: Sequence[float | None]) -> float | None:
    """Return the first layer's value over the last's; None where either is None, or the last 0."""
    first, last = layers[0], layers[-1]
    return first / last if first is not None and last else None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
