"""The papers in plain PyTorch: the oracle for fairseq's and Megatron's layers.

Slow, single-device, without dropout; every scheme, every dtype. Independent of the fast norms and
gains on purpose: only placement.py is shared, every norm is written from its formula.

One layer, sublayer by sublayer (A, B, C and the others are absent unless the scheme has them):

    a = A(x); q, k, v = a W_q + b_q, ...           cross-attention: k, v from the encoder's output
    q, k = N(q), N(k)                              QK-norm, before the factor 1 / sqrt(head_dim)
    head_i = softmax(q_i k_i^T / sqrt(head_dim) + mask) v_i
    f = concat(g_i head_i) W_O + b_O               head scale before, or g_i * (...)_i after
    x = C(x + B(f))
    h = N_hidden(act(A(x) W_1 + b_1)); f = h W_2 + b_2
    x = C(lambda * x + B(f))

Parameter names, stable, for ``load_state_dict(strict=True)``. W_x.weight is (out, in).

    layer    {attention,cross_attention}.{q,k,v,out}.{weight,bias}      ffn.{fc1,fc2}.{weight,bias}
             {attention,cross_attention}.{input,query,key,output,residual}.{weight,bias}
             {attention,cross_attention}.head_scale
             ffn.{input,hidden,output,residual}.{weight,bias}           ffn.residual_scale
    stack    token_embedding.weight  stack.{embedding,final}.{weight,bias}  layers.<i>.<layer name>
    encoder-decoder    encoder.<stack name>  decoder.<stack name>

So a norm at ``Site(sublayer, role)`` is ``<sublayer>.<role>.weight`` (and ``.bias`` for LayerNorm)
and a scale is ``<sublayer>.<role>``. Gains start neutral, as the scheme says; the linears keep
PyTorch's start, which is no part of the oracle.

Shapes: layers take x (S, B, D) as both frameworks do; models take tokens (B, S) and return
(B, S, vocab). S sequence, B batch, D d_model, H heads, K head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from normplugin.errors import SchemeError
from normplugin.placement import Dims, NormScheme, NormSpec, Site

Activation = Callable[[Tensor], Tensor]


def gelu(x: Tensor) -> Tensor:
    """Return x * Phi(x) with the exact error function."""
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0)."""
    return x.clamp(min=0.0)


def causal_mask(size: int, like: Tensor) -> Tensor:
    """Additive (S, S) mask in the dtype of ``like``: -inf where the key lies in the future."""
    return torch.full((size, size), -math.inf, dtype=like.dtype, device=like.device).triu(1)


class ReferenceNorm(nn.Module):
    """The norm of one site, from its formula, over the last dimension.

        layernorm   y = gain * (x - mean(x)) / sqrt(var(x) + eps) + bias     var divides by width
        rmsnorm     y = gain * x / sqrt(mean(x^2) + eps)
        gain = weight, or 1 + weight if zero-centred

    Dtype:  computed in fp32 or the input's dtype if that is wider; output = input dtype.
    """

    def __init__(self, width: int, spec: NormSpec, gain: float = 1.0) -> None:
        super().__init__()
        self.spec = spec
        start = gain - 1.0 if spec.zero_centered else gain
        self.weight = nn.Parameter(torch.full((width,), start))
        self.bias = nn.Parameter(torch.zeros(width)) if spec.type == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., width)."""
        z = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.spec.type == "layernorm":
            z = z - z.mean(dim=-1, keepdim=True)
        z = z / torch.sqrt((z * z).mean(dim=-1, keepdim=True) + self.spec.eps)
        z = z * (1.0 + self.weight if self.spec.zero_centered else self.weight)
        if self.bias is not None:
            z = z + self.bias
        return z.to(x.dtype)


def _site(scheme: NormScheme, sublayer: str, role: str) -> Site | None:
    sites = (*scheme.layer_sites(cross_attention=True), *scheme.stack_sites())
    return next((s for s in sites if (s.sublayer, s.role) == (sublayer, role)), None)


def norm_at(scheme: NormScheme, dims: Dims, sublayer: str, role: str) -> nn.Module:
    """Return the norm the scheme has at this site, or an identity without parameters."""
    site = _site(scheme, sublayer, role)
    if site is None:
        return nn.Identity()
    gain = scheme.output_norm_init if role == "output" else 1.0
    return ReferenceNorm(dims.width(site.width), scheme.norm, gain)


def scale_at(scheme: NormScheme, dims: Dims, sublayer: str, role: str) -> nn.Parameter | None:
    """Return the learned scale the scheme has at this site, starting at 1, or None."""
    site = _site(scheme, sublayer, role)
    return None if site is None else nn.Parameter(torch.ones(dims.width(site.width)))


class ReferenceAttention(nn.Module):
    """Self- or cross-attention with its residual add: x -> C(x + B(Attn(A(x)))).

    Source: Shleifer et al. 2021, arXiv:2110.09456, HeadScaleMHA; Kim et al. 2025,
        arXiv:2502.02732, positions A, B, C; OLMo 2 (full) and Qwen3 (head) for the QK-norm.
    Raises: SchemeError if n_heads does not divide d_model.
    """

    def __init__(self, scheme: NormScheme, dims: Dims, sublayer: str = "attention") -> None:
        super().__init__()
        if dims.d_model % dims.n_heads:
            raise SchemeError(
                f"d_model: got {dims.d_model} with {dims.n_heads} heads; each head needs the same "
                "whole width. Take a d_model divisible by n_heads."
            )
        self.scheme, self.dims = scheme, dims
        self.q = nn.Linear(dims.d_model, dims.d_model)
        self.k = nn.Linear(dims.d_model, dims.d_model)
        self.v = nn.Linear(dims.d_model, dims.d_model)
        self.out = nn.Linear(dims.d_model, dims.d_model)
        self.input = norm_at(scheme, dims, sublayer, "input")
        self.query = norm_at(scheme, dims, sublayer, "query")
        self.key = norm_at(scheme, dims, sublayer, "key")
        self.head_scale = scale_at(scheme, dims, sublayer, "head_scale")
        self.output = norm_at(scheme, dims, sublayer, "output")
        self.residual = norm_at(scheme, dims, sublayer, "residual")

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        padding: Tensor | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after this sublayer, (S, B, D).

        Args:
            x: Residual stream, (S, B, D).
            mask: Added to the scores, broadcast to (B, H, S, keys).
            padding: True at keys that are padding, (B, keys). A query that sees no key is NaN.
            memory: Keys and values come from here, (keys, B, D), and not from x.
        """
        a = self.input(x)  # A
        source = a if memory is None else memory
        q, k, v = self.q(a), self.k(source), self.v(source)
        if self.scheme.qk_norm == "full":
            q, k = self.query(q), self.key(k)
        q, k, v = self._split(q), self._split(k), self._split(v)
        if self.scheme.qk_norm == "head":
            q, k = self.query(q), self.key(k)
        heads = torch.einsum("bhqk,kbhd->qbhd", self._weights(q, k, mask, padding), v)
        heads = self._scale_heads(heads, "before-out-proj")
        f = self.out(heads.flatten(2))
        f = self._scale_heads(self._split(f), "after-out-proj").flatten(2)
        f = self.output(f)  # B
        return self.residual(x + f)  # C

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.dims.n_heads, self.dims.head_dim))

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor:
        scores = torch.einsum("qbhd,kbhd->bhqk", q, k) / math.sqrt(self.dims.head_dim)
        scores = scores.to(torch.promote_types(q.dtype, torch.float32))
        if mask is not None:
            scores = scores + mask
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None, :], -math.inf)
        return torch.softmax(scores, dim=-1).to(q.dtype)

    def _scale_heads(self, heads: Tensor, where: str) -> Tensor:
        if self.head_scale is None or self.scheme.head_scale != where:
            return heads
        return heads * self.head_scale[:, None]


class ReferenceFFN(nn.Module):
    """FFN with its residual add: x -> C(lambda * x + B(W_2 N(act(W_1 A(x) + b_1)) + b_2)).

    Source: Shleifer et al. 2021, arXiv:2110.09456 (hidden norm, lambda on the skip path only).
    """

    def __init__(self, scheme: NormScheme, dims: Dims, activation: Activation = gelu) -> None:
        super().__init__()
        self.activation = activation
        self.fc1 = nn.Linear(dims.d_model, dims.d_ffn)
        self.fc2 = nn.Linear(dims.d_ffn, dims.d_model)
        self.input = norm_at(scheme, dims, "ffn", "input")
        self.hidden = norm_at(scheme, dims, "ffn", "hidden")
        self.output = norm_at(scheme, dims, "ffn", "output")
        self.residual_scale = scale_at(scheme, dims, "ffn", "residual_scale")
        self.residual = norm_at(scheme, dims, "ffn", "residual")

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this sublayer, (S, B, D)."""
        a = self.input(x)  # A
        h = self.activation(self.fc1(a))
        h = self.hidden(h)
        f = self.fc2(h)
        f = self.output(f)  # B
        skip = x if self.residual_scale is None else self.residual_scale * x
        return self.residual(skip + f)  # C


class ReferenceLayer(nn.Module):
    """One layer: self-attention, cross-attention if asked for, FFN.

    An encoder layer is one called without ``mask``, a decoder layer one called with `causal_mask`.
    """

    def __init__(
        self,
        scheme: NormScheme,
        dims: Dims,
        activation: Activation = gelu,
        cross_attention: bool = False,
    ) -> None:
        super().__init__()
        self.attention = ReferenceAttention(scheme, dims)
        self.cross_attention = (
            ReferenceAttention(scheme, dims, "cross_attention") if cross_attention else None
        )
        self.ffn = ReferenceFFN(scheme, dims, activation)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        padding: Tensor | None = None,
        memory: Tensor | None = None,
        memory_padding: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after this layer, (S, B, D).

        Args:
            x: Residual stream, (S, B, D).
            mask: Added to the self-attention scores, broadcast to (B, H, S, S).
            padding: True at padding, (B, S).
            memory: Output of the encoder, (T, B, D); required with cross-attention.
            memory_padding: True at padding of the encoder, (B, T).
        """
        x = self.attention(x, mask, padding)
        if self.cross_attention is not None:
            assert memory is not None, "a layer with cross-attention needs the encoder's output"
            x = self.cross_attention(x, None, memory_padding, memory)
        return self.ffn(x)
