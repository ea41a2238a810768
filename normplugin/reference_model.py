"""Whole small models out of `normplugin.reference` layers: the oracle for complete models.

    x_0 = N_emb(embed_scale * E[token] + positions);  x_l = layer(x_{l-1});  y = N_final(x_L)
    logits = y E^T                                                              tied, without bias

How positions are made is not the oracle's business: the caller passes the tensor that is added.
Parameter names: see `normplugin.reference`.
"""

from __future__ import annotations

from torch import Tensor, nn

from normplugin.placement import Dims, NormScheme
from normplugin.reference import Activation, ReferenceLayer, causal_mask, gelu, norm_at


class ReferenceStack(nn.Module):
    """Embedding, layers, final norm and tied output; causal or not, with or without an encoder."""

    def __init__(
        self,
        scheme: NormScheme,
        dims: Dims,
        vocab_size: int,
        activation: Activation = gelu,
        *,
        causal: bool,
        cross_attention: bool = False,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.token_embedding = nn.Embedding(vocab_size, dims.d_model)
        self.stack = nn.ModuleDict(
            {role: norm_at(scheme, dims, "stack", role) for role in ("embedding", "final")}
        )
        self.layers = nn.ModuleList(
            ReferenceLayer(scheme, dims, activation, cross_attention) for _ in range(dims.n_layers)
        )

    def features(
        self,
        tokens: Tensor,
        positions_embedding: Tensor | None = None,
        embed_scale: float = 1.0,
        padding: Tensor | None = None,
        memory: Tensor | None = None,
        memory_padding: Tensor | None = None,
    ) -> Tensor:
        """Return y = N_final(x_L), (B, S, D).

        Args:
            tokens: Ids, (B, S).
            positions_embedding: Added to the scaled embeddings, broadcast to (B, S, D).
            embed_scale: Factor of the token embeddings.
            padding: True at padding, (B, S); outputs there mean nothing.
            memory: Features of the encoder, (B, T, D).
            memory_padding: True at padding of the encoder, (B, T).
        """
        x = embed_scale * self.token_embedding(tokens)
        if positions_embedding is not None:
            x = x + positions_embedding
        x = self.stack["embedding"](x).transpose(0, 1)
        mask = causal_mask(x.size(0), x) if self.causal else None
        memory = None if memory is None else memory.transpose(0, 1)
        for layer in self.layers:
            x = layer(x, mask, padding, memory, memory_padding)
        return self.stack["final"](x).transpose(0, 1)

    def forward(
        self,
        tokens: Tensor,
        positions_embedding: Tensor | None = None,
        embed_scale: float = 1.0,
        padding: Tensor | None = None,
        memory: Tensor | None = None,
        memory_padding: Tensor | None = None,
    ) -> Tensor:
        """Return the logits, (B, S, vocab); arguments as in `features`."""
        y = self.features(tokens, positions_embedding, embed_scale, padding, memory, memory_padding)
        return y @ self.token_embedding.weight.T


class ReferenceDecoderLM(ReferenceStack):
    """Causal language model (kind ``causal_lm``)."""

    def __init__(
        self, scheme: NormScheme, dims: Dims, vocab_size: int, activation: Activation = gelu
    ) -> None:
        super().__init__(scheme, dims, vocab_size, activation, causal=True)


class ReferenceEncoder(ReferenceStack):
    """Bidirectional encoder (kind ``masked_lm``); a head above the features is the caller's."""

    def __init__(
        self, scheme: NormScheme, dims: Dims, vocab_size: int, activation: Activation = gelu
    ) -> None:
        super().__init__(scheme, dims, vocab_size, activation, causal=False)


class ReferenceEncoderDecoder(nn.Module):
    """Encoder and decoder of the same sizes (kind ``encoder_decoder``).

    The two embeddings are separate; for shared ones assign
    ``model.decoder.token_embedding = model.encoder.token_embedding``.
    """

    def __init__(
        self, scheme: NormScheme, dims: Dims, vocab_size: int, activation: Activation = gelu
    ) -> None:
        super().__init__()
        self.encoder = ReferenceEncoder(scheme, dims, vocab_size, activation)
        self.decoder = ReferenceStack(
            scheme, dims, vocab_size, activation, causal=True, cross_attention=True
        )

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_positions: Tensor | None = None,
        target_positions: Tensor | None = None,
        embed_scale: float = 1.0,
        source_padding: Tensor | None = None,
        target_padding: Tensor | None = None,
    ) -> Tensor:
        """Return the decoder's logits, (B, S, vocab), for source (B, T) and target (B, S)."""
        memory = self.encoder.features(source, source_positions, embed_scale, source_padding)
        return self.decoder(
            target, target_positions, embed_scale, target_padding, memory, source_padding
        )
