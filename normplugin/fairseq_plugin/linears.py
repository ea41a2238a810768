"""Linears that carry norms and scales, for modules whose code upstream wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from normplugin.errors import SchemeError
from normplugin.gains import HeadScaledLinear
from normplugin.norms import Activation, Norm, activation_norm, activation_norm_linear


def specialize(module: nn.Module, cls: type):
    """Give a module built by upstream's factory a subclass of its class, and return it.

    Its parameters, their names, the random state and its hooks stay as they are; building a new
    module would repeat upstream's factory arguments, which differ between releases.
    """
    if not isinstance(module, cls):
        if not issubclass(cls, type(module)):
            raise SchemeError(
                f"layer: got a {type(module).__name__} where the scheme needs a {cls.__name__}; "
                "an option replaced the module. Drop that option or take another scheme."
            )
        module.__class__ = cls
        for name in ("input_norm", "output_norm"):
            # Registered and not a class attribute: that would hide the module set later.
            if issubclass(cls, WithNorms) and name not in module._modules:
                module.register_module(name, None)
    return module


class WithNorms:
    """A module with a norm in front of it, behind it, both or neither."""

    if TYPE_CHECKING:  # torch.jit would read them
        input_norm: nn.Module | None
        output_norm: nn.Module | None


class NormedLinear(nn.Linear, WithNorms):
    """A linear with a norm in front of it, behind it, or both.

        y = N_out(W N_in(x) + b)

    Shapes: x (..., D_in) -> (..., D_out).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, project, normalise."""
        y = self.project(x if self.input_norm is None else self.input_norm(x))
        return y if self.output_norm is None else self.output_norm(y)

    def project(self, x: Tensor) -> Tensor:
        """W x + b."""
        return F.linear(x, self.weight, self.bias)


class HiddenNormLinear(NormedLinear):
    """The FFN's second half, from the first linear's output on.

        y = N_out(W_2 N_hidden(drop(act(h))) + b_2)

    Without activation dropout, activation and norm are one autograd function that keeps h only.

    Source: arXiv:2110.09456, section 2; the norm follows the activation dropout as upstream.
    Shapes: h (..., d_ffn) -> (..., d_model).
    """

    if TYPE_CHECKING:
        activation_fn: Activation
        hidden_norm: Norm
        dropout: FairseqDropout
        recompute: bool

    def project(self, x: Tensor) -> Tensor:
        """W_2 N(drop(act(h))) + b_2."""
        if self.dropout.p > 0 and (self.training or self.dropout.apply_during_inference):
            return super().project(self.hidden_norm(self.dropout(self.activation_fn(x))))
        if self.recompute and not torch.jit.is_tracing():
            return activation_norm_linear(x, self.activation_fn, self.hidden_norm, self)
        return super().project(activation_norm(x, self.activation_fn, self.hidden_norm))


class HeadNorm(Norm):
    """A norm of every head's channels, with one gain for all heads.

    Shapes: x (..., H * head_dim) -> same.  State: weight (head_dim,), bias (head_dim,).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise every head."""
        return super().forward(x.unflatten(-1, (-1, self.weight.numel()))).flatten(-2)


class OutProjection(HeadScaledLinear):
    """An output projection that initialisers see without its head scale.

    fairseq's BERT initialiser draws into ``weight.data``; of W diag(g) that would be a copy.
    """

    def apply(self, fn):
        """Apply a function to W and b."""
        scale = self._parameters.pop("head_scale", None)
        try:
            return super().apply(fn)
        finally:
            if scale is not None:
                self.head_scale = scale
