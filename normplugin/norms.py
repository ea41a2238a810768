"""LayerNorm and RMSNorm of every adapter, and the activation-plus-norm of the FFN.

    LayerNorm   y = (x - mean(x)) / sqrt(var(x) + eps) * g + b      biased variance
    RMSNorm     y = x / sqrt(mean(x^2) + eps) * g
    g = weight, or 1 + weight when zero-centred

Dtype, said once for the whole package: statistics and gain are applied in fp32 (fp64 for fp64
input), the result is rounded once, and the output has the input's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from normplugin.kernels import apex_norm
from normplugin.placement import NormSpec

Activation = Callable[[Tensor], Tensor]
Stats = tuple[Tensor, ...]


class Norm(nn.Module):
    """One norm over the last axis.

        y = N(x)

    Source: Ba et al. 2016, arXiv:1607.06450; Zhang & Sennrich 2019, arXiv:1910.07467.
    Shapes: x (..., D) -> y same.
    Dtype:  see the module docstring.
    State:  weight (D,); bias (D,) for LayerNorm only.

    Args:
        width: D.
        spec: Type, eps and whether the gain is stored as an offset from 1.
        init: The value at which the gain starts.
    """

    __jit_unused_properties__ = ("gain",)  # torch.jit.trace would compile it

    def __init__(self, width: int, spec: NormSpec, init: float = 1.0):
        super().__init__()
        self.spec = spec
        start = init - 1.0 if spec.zero_centered else init
        self.weight = nn.Parameter(torch.full((width,), start))
        self.bias = nn.Parameter(torch.zeros(width)) if spec.type == "layernorm" else None

    @property
    def gain(self) -> Tensor:
        """The factor applied, shape (D,): fp32 at least when zero-centred, else as stored."""
        if not self.spec.zero_centered:
            return self.weight
        return self.weight.to(_wide(self.weight.dtype)) + 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of x."""
        gain = self.gain
        if torch.jit.is_tracing():  # a trace holds no Python function
            return _normalize(x, gain, self.bias, self.spec)[0]
        fused = apex_norm(self.spec.type, x.device.type) if gain.dtype == x.dtype else None
        if fused is not None:
            return fused(x, gain, self.bias, self.spec.eps)
        if self.bias is not None and gain.dtype == x.dtype:
            return F.layer_norm(x, gain.shape, gain, self.bias, self.spec.eps)
        return _NormFunction.apply(x, gain, self.bias, self.spec)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        zero = ", zero_centered" if self.spec.zero_centered else ""
        return f"{self.weight.numel()}, {self.spec.type}, eps={self.spec.eps}{zero}"


def activation_norm(h: Tensor, activation: Activation, norm: Norm) -> Tensor:
    """Return N(act(h)), keeping only h and two statistics per token for the backward pass.

    Unfused, act(h) would be kept as well: one activation of width d_ffn per token.

    Source: Shleifer et al. 2021, arXiv:2110.09456, section 2 (FFN LayerNorm).
    Shapes: h (..., d_ffn) -> same.
    """
    if torch.jit.is_tracing():
        return norm(activation(h))
    return _ActivationNorm.apply(h, norm.gain, norm.bias, activation, norm.spec)


def activation_norm_linear(h: Tensor, activation: Activation, norm: Norm, linear: nn.Linear):
    """Return W_2 N(act(h)) + b_2, keeping only h: the input of W_2 is rebuilt in the backward.

    Saves one more activation of width d_ffn per token than `activation_norm`, for one more
    activation and norm per backward pass.

    Shapes: h (..., d_ffn) -> (..., d_model).
    """
    return _ActivationNormLinear.apply(
        h, norm.gain, norm.bias, linear.weight, linear.bias, activation, norm.spec
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _normalize(
    x: Tensor, gain: Tensor, bias: Tensor | None, spec: NormSpec
) -> tuple[Tensor, Stats]:
    """Return N(x) in x's dtype, and the statistics that `_normalize_backward` takes."""
    if spec.type == "layernorm":
        same = x if x.dtype == gain.dtype else x.to(_wide(x.dtype))
        g, b = gain.to(same.dtype), bias.to(same.dtype) if bias is not None else None
        y, mean, rstd = torch.native_layer_norm(same, gain.shape, g, b, spec.eps)
        return y.to(x.dtype), (mean, rstd)
    wide = x.to(_wide(x.dtype))
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.size(-1)
    rstd = torch.rsqrt(mean_square + spec.eps)
    return (wide * rstd).mul_(gain).to(x.dtype), (rstd,)


def _normalize_backward(
    dy: Tensor, x: Tensor, stats: Stats, gain: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, gain and bias (None for RMSNorm)."""
    wide_dy, wide_x = dy.to(_wide(x.dtype)), x.to(_wide(x.dtype))
    if bias is not None:
        mean, rstd = (s.to(wide_x.dtype) for s in stats)
        g, b = gain.to(wide_x.dtype), bias.to(wide_x.dtype)
        dx, dgain, dbias = torch.ops.aten.native_layer_norm_backward(
            wide_dy, wide_x, gain.shape, mean, rstd, g, b, [True, True, True]
        )
        return dx.to(x.dtype), dgain.to(gain.dtype), dbias.to(bias.dtype)
    dx, dgain = _rms_backward(wide_dy, wide_x, stats[0], gain.to(wide_x.dtype))
    return dx.to(x.dtype), dgain.to(gain.dtype), None


def _rms_backward(dy: Tensor, x: Tensor, rstd: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and gain of RMSNorm, all in one dtype.

    LayerNorm's kernel with a mean of 0 gives RMSNorm's gradient less rstd * mean(dy * gain): one
    kernel, one product and one addition, on a CPU 0.7 of the time of the formula term by term.
    """
    dx, dgain, _ = torch.ops.aten.native_layer_norm_backward(
        dy, x, gain.shape, torch.zeros_like(rstd), rstd, gain, None, [True, True, False]
    )
    with torch.autocast(dy.device.type, enabled=False):  # it would take the product in bf16
        row = (dy @ gain).div_(gain.numel()).unsqueeze(-1)
    return dx.add_(row * rstd), dgain


class _NormFunction(torch.autograd.Function):
    """N(x) that keeps x in its own dtype and one or two statistics per token."""

    @staticmethod
    def forward(ctx, x, gain, bias, spec):
        y, stats = _normalize(x, gain, bias, spec)
        ctx.save_for_backward(x, gain, bias, *stats)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, gain, bias, *stats = ctx.saved_tensors
        return *_normalize_backward(dy, x, tuple(stats), gain, bias), None


def _activation_norm_backward(dy, a, h, stats, gain, bias):
    """Gradients of h, gain and bias through N(act(h)); a = act(h) carries the graph back to h."""
    da, dgain, dbias = _normalize_backward(dy, a.detach(), stats, gain, bias)
    return _activation_backward(a, h, da), dgain, dbias


def _activation_backward(a: Tensor, h: Tensor, da: Tensor) -> Tensor:
    """Return the gradient of h; overwrites da.

    Where act is GELU and nothing else, the gradient is written over da. Autograd would take memory
    for another d_ffn per token, and a tenth more time for this backward pass on a CPU.
    """
    node: Any = a.grad_fn
    if node is not None and node.name() == "GeluBackward0" and node._saved_self.is_set_to(h):
        return torch.ops.aten.gelu_backward.grad_input(
            da, h, approximate=node._saved_approximate, grad_input=da
        )
    return torch.autograd.grad(a, h, da)[0]


def _rerun(h: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return a leaf copy of h and act(h) with a graph between them."""
    with torch.enable_grad():
        leaf = h.detach().requires_grad_()
        return leaf, activation(leaf)


class _ActivationNorm(torch.autograd.Function):
    """N(act(h)); the backward evaluates act again."""

    @staticmethod
    def forward(ctx, h, gain, bias, activation, spec):
        y, stats = _normalize(activation(h), gain, bias, spec)
        ctx.activation = activation
        ctx.save_for_backward(h, gain, bias, *stats)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        h, gain, bias, *stats = ctx.saved_tensors
        leaf, a = _rerun(h, ctx.activation)
        return *_activation_norm_backward(dy, a, leaf, tuple(stats), gain, bias), None, None


class _ActivationNormLinear(torch.autograd.Function):
    """W N(act(h)) + b; the backward evaluates act and N again."""

    @staticmethod
    def forward(ctx, h, gain, bias, weight, linear_bias, activation, spec):
        y, stats = _normalize(activation(h), gain, bias, spec)
        ctx.activation, ctx.spec = activation, spec
        ctx.has_linear_bias = linear_bias is not None
        ctx.save_for_backward(h, gain, bias, weight, *stats)
        linear_bias = linear_bias.to(h.dtype) if ctx.has_linear_bias else None
        return F.linear(y, weight.to(h.dtype), linear_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        h, gain, bias, weight, *stats = ctx.saved_tensors
        leaf, a = _rerun(h, ctx.activation)
        y, _ = _normalize(a.detach(), gain, bias, ctx.spec)  # 1 kernel; from the statistics: 3
        rows = dout.flatten(0, -2)
        dweight = (rows.t() @ y.flatten(0, -2)).to(weight.dtype)
        del y
        dlinear_bias = rows.sum(0).to(weight.dtype) if ctx.has_linear_bias else None
        dy = dout @ weight.to(dout.dtype)
        dh, dgain, dbias = _activation_norm_backward(dy, a, leaf, tuple(stats), gain, bias)
        return dh, dgain, dbias, dweight, dlinear_bias, None, None
