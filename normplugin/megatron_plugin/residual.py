"""Megatron's bias-dropout-add with the sites of a scheme: where the deferred bias is at hand."""

from __future__ import annotations

import functools

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from normplugin.gains import scale_heads
from normplugin.megatron_plugin.norms import MegatronNorm
from normplugin.placement import NormScheme, Site


class BiasDropoutAdd(nn.Module):
    """The end of one sublayer.

        y = N_residual(lambda * residual + dropout(N_output(g * (x + bias))))

    Built for the self_attn_bda, cross_attn_bda and mlp_bda slots: the output may come from a dense
    FFN, a whole MoE layer (shared experts included) or any attention.

    State: output_norm, residual_norm (D,), residual_scale (D,), head_scale (n_heads,) for the
        scale after the projection; each only where the scheme has it. Replicated over TP.
    """

    residual_scale: nn.Parameter | None
    head_scale: nn.Parameter | None

    def __init__(
        self,
        sites: tuple[Site, ...],
        scheme: NormScheme,
        layer_config: TransformerConfig,
        config: TransformerConfig | None = None,  # Megatron gives it to cross_attn_bda only
    ):
        super().__init__()
        roles = {site.role for site in sites}
        width = layer_config.hidden_size
        self.output_norm = self.residual_norm = None
        if "output" in roles:
            self.output_norm = MegatronNorm(layer_config, width, init=scheme.output_norm_init)
        if "residual" in roles:
            self.residual_norm = MegatronNorm(layer_config, width)
        sizes = {"residual_scale": width, "head_scale": layer_config.num_attention_heads}
        for name, size in sizes.items():
            scale = _replicated_ones(size, layer_config) if name in roles else None
            self.register_parameter(name, scale)

    def forward(self, training: bool, fused: bool):
        """Return Megatron's function of ((x, bias), residual, dropout)."""
        return functools.partial(self._add, get_bias_dropout_add(training, fused))

    def _add(self, bias_dropout_add, x_with_bias, residual: Tensor, dropout: float) -> Tensor:
        x, bias = x_with_bias
        if bias is not None and (self.head_scale is not None or self.output_norm is not None):
            x, bias = x + bias, None
        if self.head_scale is not None:
            x = scale_heads(x, self.head_scale)
        if self.output_norm is not None:
            x = self.output_norm(x)
        if self.residual_scale is not None:
            residual = residual * self.residual_scale
        out = bias_dropout_add((x, bias), residual, dropout)
        return out if self.residual_norm is None else self.residual_norm(out)


def _replicated_ones(size: int, config: TransformerConfig) -> nn.Parameter:
    scale = nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    scale.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return scale
