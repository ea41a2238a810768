"""The encoder-decoder: fairseq's transformer with any scheme."""

# No postponed annotations: fairseq reads the types of dataclass fields.
# ruff: noqa: UP045  (fairseq and old omegaconf read Optional[X])
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel, register_model
from fairseq.models.transformer import TransformerConfig, TransformerModelBase

from normplugin.fairseq_plugin.scheme_options import (
    SIZES,
    SchemeConfig,
    about,
    left_to_architecture,
)
from normplugin.fairseq_plugin.stacks import NormDecoder, NormEncoder, placing_of


def _flat(config: type, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields of a config and of the configs in it: ``encoder_embed_dim``.

    fairseq's command line cannot fill a config inside a config.
    """
    for f in dataclasses.fields(config):
        if isinstance(f.type, type) and issubclass(f.type, FairseqDataclass):
            yield from _flat(f.type, f"{f.name}_")
        elif not f.name.startswith("_"):
            yield prefix + f.name, f.type, field(default=f.default, metadata=dict(f.metadata))


_TransformerConfig: Any = make_dataclass(
    "_TransformerConfig", _flat(TransformerConfig), bases=(FairseqDataclass,)
)


@dataclass
@left_to_architecture(*(f"{side}_{size}" for side in ("encoder", "decoder") for size in SIZES))
class NormTransformerConfig(SchemeConfig, _TransformerConfig):
    """Upstream's options of ``transformer`` and ours."""

    # Upstream declares lists or interpolations of nested names here, and reads these types.
    encoder_layers_to_keep: Optional[str] = field(
        default=None, metadata=about("encoder layers to keep when pruning, comma-separated")
    )
    decoder_layers_to_keep: Optional[str] = field(
        default=None, metadata=about("decoder layers to keep when pruning, comma-separated")
    )
    adaptive_softmax_cutoff: Optional[str] = field(
        default=None, metadata=about("adaptive softmax cutoff points, comma-separated")
    )
    decoder_input_dim: Optional[int] = field(
        default=None, metadata=about("decoder input dimension; default: --decoder-embed-dim")
    )
    decoder_output_dim: Optional[int] = field(
        default=None, metadata=about("decoder output dimension; default: --decoder-embed-dim")
    )


@register_model("normplugin_mt", dataclass=NormTransformerConfig)
class NormTransformer(TransformerModelBase):
    """fairseq's ``transformer`` with any `NormScheme`.

    ``postln`` is upstream's default, ``preln`` it with ``--encoder-normalize-before`` and
    ``--decoder-normalize-before``, both bit for bit.
    """

    @classmethod
    def add_args(cls, parser):
        """Upstream's are those of nested configs."""
        BaseFairseqModel.add_args.__func__(cls, parser)

    @classmethod
    def build_model(cls, args, task):
        """Build the model; encoder and decoder compare what is promised with what exists."""
        placing = placing_of(args, task, "encoder_decoder")
        cfg = TransformerConfig.from_namespace(args)
        cfg.placing = placing  # for the two methods below
        return super().build_model(cfg, task)

    @classmethod
    def build_encoder(cls, cfg, src_dict, embed_tokens):
        """Upstream's method with our stack."""
        return NormEncoder(cfg, cfg.placing, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg, tgt_dict, embed_tokens):
        """Upstream's method with our stack."""
        return NormDecoder(cfg, cfg.placing, tgt_dict, embed_tokens)
