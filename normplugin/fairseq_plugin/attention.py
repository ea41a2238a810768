"""fairseq's attention with the sites of a scheme."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from normplugin.fairseq_plugin.linears import (
    HeadNorm,
    NormedLinear,
    OutProjection,
    WithNorms,
    specialize,
)
from normplugin.gains import scale_heads
from normplugin.norms import Norm
from normplugin.placement import NormScheme


class NormedAttention(MultiheadAttention, WithNorms):
    """Upstream's attention with the sites of a scheme, on every path upstream takes.

        y = N_out(scale(concat(g_i head_i) W_O + b))    heads from A(query), N(q), N(k)

    The head scale before W_O is part of ``out_proj.weight``; queries and keys are normalised by
    their projections, so the paths that call ``q_proj`` need no code here.

    Shapes: query (T, B, D), key and value (S, B, D) -> (T, B, D), weights as upstream.
    """

    __jit_unused_properties__ = ("normalizes_keys",)
    if TYPE_CHECKING:
        head_scale: nn.Parameter | None

    def place(self, scheme: NormScheme) -> None:
        """Create the sites of a scheme that sit in this module."""
        if "A" in scheme.attention and "C" in scheme.attention:
            self.input_norm = Norm(self.embed_dim, scheme.norm)
        if "B" in scheme.attention:
            self.output_norm = Norm(self.embed_dim, scheme.norm, init=scheme.output_norm_init)
        if scheme.qk_norm != "none":
            for projection in (self.q_proj, self.k_proj):
                specialize(projection, NormedLinear).output_norm = _qk_norm(self, scheme)
        self.register_parameter("head_scale", None)
        if scheme.head_scale == "before-out-proj":
            specialize(self.out_proj, OutProjection).add_head_scale(self.num_heads)
        elif scheme.head_scale == "after-out-proj":
            self.head_scale = nn.Parameter(torch.ones(self.num_heads))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state=None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as upstream does; see the class for what is added."""
        if self.input_norm is not None:
            normed = self.input_norm(query)
            key = normed if key is query else key
            value = normed if value is query else value
            query = normed
        plain = incremental_state is None and not static_kv and not before_softmax
        if self.normalizes_keys and plain and not (need_weights or need_head_weights):
            out, weights = self._attend(query, key, value, key_padding_mask, attn_mask), None
        else:
            # Upstream's fused path reads q_proj.weight past its norm; without incremental state,
            # static_kv does nothing but keep it from being taken.
            out, weights = super().forward(
                query,
                key,
                value,
                key_padding_mask=key_padding_mask,
                incremental_state=incremental_state,
                need_weights=need_weights,
                static_kv=static_kv or (self.normalizes_keys and incremental_state is None),
                attn_mask=attn_mask,
                before_softmax=before_softmax,
                need_head_weights=need_head_weights,
            )
        if before_softmax:  # attention scores and values, not an output
            return out, weights
        if self.head_scale is not None:
            out = scale_heads(out, self.head_scale)
        return out if self.output_norm is None else self.output_norm(out), weights

    @property
    def normalizes_keys(self) -> bool:
        """True with QK-norm."""
        return isinstance(self.k_proj, NormedLinear)

    def _attend(self, query, key, value, key_padding_mask, attn_mask) -> Tensor:
        """Project, attend with torch's fused kernel, project."""
        q, k, v = (
            x.unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3)
            for x in (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        )
        active = self.training or self.dropout_module.apply_during_inference
        context = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_additive_mask(attn_mask, key_padding_mask, query.dtype),
            dropout_p=self.dropout_module.p if active else 0.0,
        )
        return self.out_proj(context.permute(2, 0, 1, 3).flatten(-2))


def _additive_mask(attn_mask, key_padding_mask, dtype) -> Tensor | None:
    """Return one mask to add to the scores, broadcastable to (B, H, T, S)."""
    if key_padding_mask is None:
        return None if attn_mask is None else attn_mask.to(dtype)
    padding = key_padding_mask.bool()[:, None, None, :]
    mask = torch.zeros(padding.shape, dtype=dtype, device=padding.device)
    mask = mask.masked_fill(padding, float("-inf"))
    return mask if attn_mask is None else mask + attn_mask.to(dtype)


def _qk_norm(attention: MultiheadAttention, scheme: NormScheme) -> Norm:
    if scheme.qk_norm == "head":
        return HeadNorm(attention.head_dim, scheme.norm)
    return Norm(attention.embed_dim, scheme.norm)
