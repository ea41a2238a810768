"""The norms of the Megatron layers: replicated, and over a width that is sharded by TP."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from normplugin.errors import SchemeError
from normplugin.norms import Norm
from normplugin.placement import NormSpec

_TYPES = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}


def norm_spec(config: TransformerConfig) -> NormSpec:
    """Return the norm that Megatron's own options ask for: type, eps, zero-centred gain.

    Raises:
        SchemeError: For a normalization that is neither LayerNorm nor RMSNorm.
    """
    if config.normalization not in _TYPES:
        raise SchemeError(
            f"--normalization: got {config.normalization!r}; legal are {', '.join(_TYPES)}. "
            "Take one of them, or Megatron's own spec."
        )
    return NormSpec(
        type=_TYPES[config.normalization],
        eps=config.layernorm_epsilon,
        zero_centered=config.layernorm_zero_centered_gamma,
    )


class MegatronNorm(Norm):
    """A norm over a width that every TP rank holds whole, built as Megatron builds its norms.

    Needs neither Transformer Engine nor apex, also with sequence parallelism.

    Reads:  config.normalization, layernorm_epsilon, layernorm_zero_centered_gamma,
            sequence_parallel, params_dtype.
    State:  replicated over TP; under sequence parallelism each rank sees its own tokens, so the
            parameters carry ``sequence_parallel`` and Megatron sums their gradients.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float | None = None,
        init: float = 1.0,
    ):
        super().__init__(hidden_size, norm_spec(config), init)
        self.to(config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ShardedNorm(Norm):
    """A norm over a width of which every TP rank holds a slice: the function of TP = 1.

        y = N(x), statistics over all ranks' channels

    One collective forward (two numbers per token and rank, one for RMSNorm) and one backward.

    Departs: from metaseq and NeMo, whose statistics or gradients depend on the TP size.
    Shapes: x (S, B, width / TP) -> same.
    Dtype:  statistics fp32 (fp64 for fp64 input), biased variance; output = input dtype.
    State:  weight, bias (width / TP,), sharded over TP on axis 0.
    """

    def __init__(
        self, config: TransformerConfig, width: int, group: torch.distributed.ProcessGroup
    ):
        if width % group.size():
            raise SchemeError(
                f"tensor parallelism: got {group.size()} ranks for a norm over {width} channels, "
                "which it does not divide. Change --tensor-model-parallel-size."
            )
        super().__init__(width // group.size(), norm_spec(config))
        self.to(config.params_dtype)
        self.group, self.width = group, width
        for parameter in self.parameters():
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis over all ranks."""
        return self.rebuildable(x)[0]

    def rebuildable(self, x: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return N(x), and a function that computes it again, without a collective."""
        x_kept = x.detach()
        if self.group.size() == 1:
            return super().forward(x), functools.partial(super().forward, x_kept)
        gain, bias = self.gain, self.bias
        y, mean, rstd = _ShardedNormFunction.apply(
            x, gain, bias, self.spec.eps, self.width, self.group
        )
        return y, functools.partial(_affine, x_kept, mean, rstd, gain.detach(), bias)


class _ShardedNormFunction(torch.autograd.Function):
    """N(x) over channels spread over a group; keeps x and the statistics."""

    @staticmethod
    def forward(ctx, x, gain, bias, eps, width, group):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, rstd = (_mean_rstd if bias is not None else _zero_rstd)(wide, eps, width, group)
        ctx.save_for_backward(x, gain, bias, mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.width, ctx.group = width, group
        return _affine(x, mean, rstd, gain, bias), mean, rstd

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _dmean, _drstd):
        x, gain, bias, mean, rstd = ctx.saved_tensors
        dy_wide = dy.to(rstd.dtype)
        x_hat = (x.to(rstd.dtype) - mean).mul_(rstd)
        scaled = dy_wide * gain
        rows = torch.stack([(scaled * x_hat).sum(-1), scaled.sum(-1)])[: 1 if bias is None else 2]
        torch.distributed.all_reduce(rows, group=ctx.group)
        rows = rows.unsqueeze(-1) / ctx.width
        dgain = (dy_wide * x_hat).flatten(0, -2).sum(0).to(gain.dtype)
        dx = scaled.addcmul_(x_hat, rows[0], value=-1.0)
        if bias is None:
            return dx.mul_(rstd).to(x.dtype), dgain, None, None, None, None
        dbias = dy_wide.flatten(0, -2).sum(0).to(bias.dtype)
        return dx.sub_(rows[1]).mul_(rstd).to(x.dtype), dgain, dbias, None, None, None


def _affine(x: Tensor, mean: Tensor, rstd: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    y = (x.to(rstd.dtype) - mean).mul_(rstd).mul_(gain)
    return (y if bias is None else y.add_(bias)).to(x.dtype)


def _mean_rstd(x: Tensor, eps: float, width: int, group) -> tuple[Tensor, Tensor]:
    """Mean and 1/std over all ranks, merged from each rank's mean and squared deviations.

    A sum of squares less the squared mean would cancel in fp32 where the mean is large.
    """
    local = x.mean(-1, keepdim=True)
    mine = torch.stack([local, (x - local).square_().sum(-1, keepdim=True)])
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(theirs, mine, group=group)
    means, deviations = torch.stack(theirs, dim=1)
    mean = means.mean(0)
    total = deviations.sum(0) + (means - mean).square_().sum(0) * x.size(-1)
    return mean, torch.rsqrt(total / width + eps)


def _zero_rstd(x: Tensor, eps: float, width: int, group) -> tuple[Tensor, Tensor]:
    """0 and 1/root mean square over all ranks."""
    squares = x.square().sum(-1, keepdim=True)
    torch.distributed.all_reduce(squares, group=group)
    return torch.zeros_like(squares), torch.rsqrt(squares / width + eps)
