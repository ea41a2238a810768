"""The fairseq decoder layer of any scheme.

Upstream's ``forward`` is inherited whole. What a scheme adds lives in the modules that forward
already calls: the norm slots of the layer, the attention module, ``fc1`` and ``fc2``. A scheme
that adds nothing leaves upstream's modules as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fairseq.modules import FairseqDropout, MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor, nn

from normplugin.errors import SchemeError
from normplugin.gains import HeadScaledLinear, scale_heads
from normplugin.norms import Activation, Norm, activation_norm, activation_norm_linear
from normplugin.placement import NormScheme


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
        assert cfg.decoder.normalize_before == ("C" not in scheme.attention + scheme.ffn)
        place_attention_sites(self, "self_attn", scheme)
        if self.encoder_attn is not None:
            place_attention_sites(self, "encoder_attn", scheme)
        place_ffn_sites(self, scheme, recompute_ffn_norm)
        if scheme.residual_scale:
            self.w_resid = nn.Parameter(torch.ones(self.embed_dim))


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
        specialize(layer.fc2, NormedLinear).output_norm = _output_norm(width, scheme)
    if scheme.ffn_hidden:
        fc2 = specialize(layer.fc2, HiddenNormLinear)
        fc2.hidden_norm = Norm(hidden, scheme.norm)
        fc2.activation_fn, layer.activation_fn = layer.activation_fn, _identity
        fc2.dropout = layer.activation_dropout_module
        layer.activation_dropout_module = FairseqDropout(0.0, module_name=fc2.dropout.module_name)
        fc2.recompute = recompute


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

    activation_fn: Activation
    hidden_norm: Norm
    dropout: FairseqDropout
    recompute: bool

    def project(self, x: Tensor) -> Tensor:
        """W_2 N(drop(act(h))) + b_2."""
        if self.dropout.p > 0 and (self.training or self.dropout.apply_during_inference):
            return super().project(self.hidden_norm(self.dropout(self.activation_fn(x))))
        if self.recompute:
            return activation_norm_linear(x, self.activation_fn, self.hidden_norm, self)
        return super().project(activation_norm(x, self.activation_fn, self.hidden_norm))


class HeadNorm(Norm):
    """A norm of every head's channels, with one gain for all heads.

    Shapes: x (..., H * head_dim) -> same.  State: weight (head_dim,), bias (head_dim,).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise every head."""
        return super().forward(x.unflatten(-1, (-1, self.weight.numel()))).flatten(-2)


class NormedAttention(MultiheadAttention, WithNorms):
    """Upstream's attention with the sites of a scheme, on every path upstream takes.

        y = N_out(scale(concat(g_i head_i) W_O + b))    heads from A(query), N(q), N(k)

    The head scale before W_O is part of ``out_proj.weight``; queries and keys are normalised by
    their projections, so the paths that call ``q_proj`` need no code here.

    Shapes: query (T, B, D), key and value (S, B, D) -> (T, B, D), weights as upstream.
    """

    head_scale: nn.Parameter | None

    def place(self, scheme: NormScheme) -> None:
        """Create the sites of a scheme that sit in this module."""
        if "A" in scheme.attention and "C" in scheme.attention:
            self.input_norm = Norm(self.embed_dim, scheme.norm)
        if "B" in scheme.attention:
            self.output_norm = _output_norm(self.embed_dim, scheme)
        if scheme.qk_norm != "none":
            for projection in (self.q_proj, self.k_proj):
                specialize(projection, NormedLinear).output_norm = _qk_norm(self, scheme)
        self.register_parameter("head_scale", None)
        if scheme.head_scale == "before-out-proj":
            specialize(self.out_proj, HeadScaledLinear).add_head_scale(self.num_heads)
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


def _slot_norm(letters: str, width: int, scheme: NormScheme) -> nn.Module:
    """Upstream's norm slot: C, else A, else nothing."""
    return Norm(width, scheme.norm) if "A" in letters or "C" in letters else nn.Identity()


def _output_norm(width: int, scheme: NormScheme) -> Norm:
    return Norm(width, scheme.norm, init=scheme.output_norm_init)


def _qk_norm(attention: MultiheadAttention, scheme: NormScheme) -> Norm:
    if scheme.qk_norm == "head":
        return HeadNorm(attention.head_dim, scheme.norm)
    return Norm(attention.embed_dim, scheme.norm)


def _identity(x: Tensor) -> Tensor:
    return x
