"""The encoder and the decoder every model is made of.

The scheme reaches the layers as an argument, from our own config. It never travels through
``TransformerConfig.from_namespace``, which drops unknown keys of a DictConfig silently (that is
how upstream's own ``--scale-*`` flags came to do nothing).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.tasks import FairseqTask
from torch import nn

from normplugin.fairseq_plugin import checkpoint
from normplugin.fairseq_plugin.checks import check_task
from normplugin.fairseq_plugin.defaults import complete
from normplugin.fairseq_plugin.layers import DecoderLayer, EncoderLayer, normalizes_before
from normplugin.fairseq_plugin.scheme_options import scheme_of
from normplugin.fairseq_plugin.sites import check_promises, promised_layer, promised_stack
from normplugin.norms import Norm
from normplugin.placement import Dims, NormScheme

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placing:
    """What a stack is told beside upstream's config.

    Attributes:
        scheme: The placement.
        kind: The model kind, one of `normplugin.placement.KINDS`.
        recompute_ffn_norm: See `DecoderLayer`.
    """

    scheme: NormScheme
    kind: str
    recompute_ffn_norm: bool = False


def placing_of(cfg, task: FairseqTask, kind: str) -> Placing:
    """Complete a model config and return what it asks for.

    Raises:
        SchemeError: For what cannot work.
    """
    check_task(type(task), kind)
    complete(cfg, kind)
    return Placing(scheme_of(cfg), kind, cfg.recompute_ffn_norm)


def dims_of(side) -> Dims:
    """Return the sizes of ``cfg.encoder`` or ``cfg.decoder``."""
    return Dims(side.layers, side.embed_dim, side.ffn_embed_dim, side.attention_heads)


class NormStack(nn.Module):
    """What encoder and decoder share: the sites outside the layers, the card, the checks."""

    __jit_unused_properties__ = ("scheme",)  # torch.jit.trace would compile it
    if TYPE_CHECKING:  # and read these
        placing: Placing
        card: checkpoint.Card

    @property
    def scheme(self) -> NormScheme:
        """The placement."""
        return self.placing.scheme

    def prepare(self, cfg, side, placing: Placing) -> None:
        """Let upstream's constructor make the slots of the scheme, in its own order."""
        self.placing = placing
        cfg.layernorm_embedding = placing.scheme.embedding_norm
        side.normalize_before = normalizes_before(placing.scheme)

    def place(self, dims: Dims) -> None:
        """Put the embedding norm and the final norm into upstream's slots, and add the card."""
        self.layernorm_embedding = self._stack_norm(self.scheme.embedding_norm, dims)
        self.layer_norm = self._stack_norm(self.scheme.final_norm, dims)
        check_promises(self.scheme, promised_stack(self.scheme, dims), self)
        checkpoint.add_card(self, checkpoint.Card(self.scheme, dims, self.placing.kind))
        logger.info("norm scheme %s, architecture hash %s", self.scheme.name, self.card.hash)

    def check_and_wrap(self, layer: nn.Module, cfg, dims: Dims, cross_attention: bool = False):
        """Check a layer, then wrap it as upstream's build method does (0.12.3)."""
        check_promises(self.scheme, promised_layer(self.scheme, dims, cross_attention), layer)
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        min_params = 0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
        return fsdp_wrap(layer, min_num_params=min_params)

    def upgrade_state_dict_named(self, state_dict, name):
        """Check that a checkpoint holds this architecture, before it is loaded.

        fairseq's EMA loads states without a version, which upstream takes for those of 2017: it
        drops the final norm.
        """
        state_dict.setdefault(f"{name}.version", self.get_buffer("version"))
        state_dict = super().upgrade_state_dict_named(state_dict, name)  # type: ignore[misc]
        checkpoint.check_state(self, state_dict, name)
        return state_dict

    def _stack_norm(self, wanted: bool, dims: Dims) -> Norm | None:
        return Norm(dims.d_model, self.scheme.norm) if wanted else None


class NormEncoder(NormStack, TransformerEncoderBase):
    """Upstream's encoder with the layers and norms of a scheme.

    Args:
        cfg: fairseq's TransformerConfig.
        placing: The scheme and more.
        args: As upstream's.
    """

    def __init__(self, cfg, placing: Placing, *args):
        self.prepare(cfg, cfg.encoder, placing)
        super().__init__(cfg, *args)
        self.place(dims_of(cfg.encoder))

    def build_encoder_layer(self, cfg):
        """Upstream's method with our layer class."""
        layer = EncoderLayer(cfg, self.scheme, self.placing.recompute_ffn_norm)
        return self.check_and_wrap(layer, cfg, dims_of(cfg.encoder))


class NormDecoder(NormStack, TransformerDecoderBase):
    """Upstream's decoder with the layers and norms of a scheme; arguments as `NormEncoder`."""

    def __init__(self, cfg, placing: Placing, *args, **kwargs):
        self.prepare(cfg, cfg.decoder, placing)
        super().__init__(cfg, *args, **kwargs)
        self.place(dims_of(cfg.decoder))

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        """Upstream's method with our layer class."""
        layer = DecoderLayer(cfg, self.scheme, no_encoder_attn, self.placing.recompute_ffn_norm)
        return self.check_and_wrap(layer, cfg, dims_of(cfg.decoder), not no_encoder_attn)
