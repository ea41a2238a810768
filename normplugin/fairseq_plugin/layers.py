"""The fairseq encoder and decoder layers of any scheme.

Upstream's ``forward`` is inherited whole. What a scheme adds lives in the modules that forward
already calls: the norm slots of the layer, the attention module, ``fc1`` and ``fc2``. A scheme
that adds nothing leaves upstream's modules as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from fairseq.modules import FairseqDropout
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from normplugin.fairseq_plugin.attention import NormedAttention
from normplugin.fairseq_plugin.linears import HiddenNormLinear, NormedLinear, specialize
from normplugin.norms import Norm
from normplugin.placement import NormScheme

# Copies of its linears that 0.12.2's encoder layer keeps for torch's fused layer.
_PACKED = tuple(
    f"{linear}_{name}"
    for linear in ("in_proj", "out_proj", "fc1", "fc2")
    for name in ("weight", "bias")
)


def normalizes_before(scheme: NormScheme) -> bool:
    """Upstream's ``normalize_before``: True for a scheme without C."""
    return "C" not in scheme.attention + scheme.ffn


class DecoderLayer(TransformerDecoderLayerBase):
    """Upstream's decoder layer with the sites of a scheme.

        x = C(x + drop(B(Attn(A(x)))))
        x = C(lambda * x + drop(B(W_2 N_hidden(act(W_1 A(x) + b_1)) + b_2)))

    Source: arXiv:2110.09456, arXiv:2502.02732. Letters the scheme lacks are the identity.
    Shapes: x (T, B, D) -> same.
    Reads:  cfg.decoder.normalize_before, which must be false exactly for schemes with C.

    Args:
        cfg: fairseq's TransformerConfig.
        scheme: The placement.
        no_encoder_attn: True for a decoder without cross-attention.
        recompute_ffn_norm: Rebuild the input of W_2 in the backward pass.
    """

    def __init__(
        self,
        cfg,
        scheme: NormScheme,
        no_encoder_attn: bool = False,
        recompute_ffn_norm: bool = False,
    ):
        super().__init__(cfg, no_encoder_attn)
        assert self.normalize_before == normalizes_before(scheme)
        place_attention_sites(self, "self_attn", scheme)
        if self.encoder_attn is not None:
            place_attention_sites(self, "encoder_attn", scheme)
        place_ffn_sites(self, scheme, recompute_ffn_norm)
        if scheme.residual_scale:
            self.w_resid = nn.Parameter(torch.ones(self.embed_dim))


class EncoderLayer(TransformerEncoderLayerBase):
    """Upstream's encoder layer with the sites of a scheme; equations and shapes: `DecoderLayer`.

    Reads: cfg.encoder.normalize_before, which must be false exactly for schemes with C.

    Args:
        cfg: fairseq's TransformerConfig.
        scheme: The placement.
        recompute_ffn_norm: Rebuild the input of W_2 in the backward pass.
    """

    if TYPE_CHECKING:  # torch.jit would read them
        can_use_fastpath: bool
        w_resid: nn.Parameter | None
        _skip_scales: Iterator[nn.Parameter | None]

    def __init__(self, cfg, scheme: NormScheme, recompute_ffn_norm: bool = False):
        super().__init__(cfg)
        assert self.normalize_before == normalizes_before(scheme)
        place_attention_sites(self, "self_attn", scheme)
        place_ffn_sites(self, scheme, recompute_ffn_norm)
        # 0.12.2 evaluates with torch's fused layer where this is true; it knows no added site.
        self.can_use_fastpath = False
        for name in _PACKED:
            self._parameters.pop(name, None)
        skip = nn.Parameter(torch.ones(self.embed_dim)) if scheme.residual_scale else None
        self.register_parameter("w_resid", skip)

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask=None):
        """Upstream's forward, whose first residual add is attention's and whose second the FFN's.

        Shapes: x (T, B, D) -> same; encoder_padding_mask (B, T), true at padding.
        """
        self._skip_scales = iter((None, self.w_resid))
        return super().forward(x, encoder_padding_mask, attn_mask)

    def residual_connection(self, x: Tensor, residual: Tensor) -> Tensor:
        """lambda * residual + x; upstream's decoder layer scales by itself."""
        scale = next(self._skip_scales)
        return super().residual_connection(x, residual if scale is None else scale * residual)

    def upgrade_state_dict_named(self, state_dict, name):
        """Upstream's, and leave out the copies in a checkpoint of 0.12.2's own model."""
        super().upgrade_state_dict_named(state_dict, name)
        for packed in _PACKED:
            state_dict.pop(f"{name}.{packed}", None)

    def _load_from_state_dict(self, *args):
        """torch's own: 0.12.2's makes the copies again."""
        nn.Module._load_from_state_dict(self, *args)


def place_attention_sites(layer: Any, name: str, scheme: NormScheme) -> None:
    """Put the attention sites of a scheme around and into ``layer.<name>``."""
    attention = getattr(layer, name)
    width = attention.embed_dim
    setattr(layer, f"{name}_layer_norm", _slot_norm(scheme.attention, width, scheme))
    if scheme.attention in ("A", "C") and scheme.head_scale == scheme.qk_norm == "none":
        return
    specialize(attention, NormedAttention).place(scheme)


def place_ffn_sites(layer: Any, scheme: NormScheme, recompute: bool) -> None:
    """Put the FFN sites of a scheme around and into ``layer.fc1`` and ``layer.fc2``."""
    width, hidden = layer.fc1.in_features, layer.fc1.out_features
    layer.final_layer_norm = _slot_norm(scheme.ffn, width, scheme)
    if "A" in scheme.ffn and "C" in scheme.ffn:
        specialize(layer.fc1, NormedLinear).input_norm = Norm(width, scheme.norm)
    if "B" in scheme.ffn:
        specialize(layer.fc2, NormedLinear).output_norm = Norm(
            width, scheme.norm, init=scheme.output_norm_init
        )
    if scheme.ffn_hidden:
        fc2 = specialize(layer.fc2, HiddenNormLinear)
        fc2.hidden_norm = Norm(hidden, scheme.norm)
        fc2.activation_fn, layer.activation_fn = layer.activation_fn, _identity
        fc2.dropout = layer.activation_dropout_module
        layer.activation_dropout_module = FairseqDropout(0.0, module_name=fc2.dropout.module_name)
        fc2.recompute = recompute


def _slot_norm(letters: str, width: int, scheme: NormScheme) -> nn.Module:
    """Upstream's norm slot: C, else A, else nothing."""
    return Norm(width, scheme.norm) if "A" in letters or "C" in letters else nn.Identity()


def _identity(x: Tensor) -> Tensor:
    return x
