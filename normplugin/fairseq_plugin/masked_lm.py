"""The masked language model: fairseq's RoBERTa with any scheme."""

# No postponed annotations: fairseq reads the types of dataclass fields.
# ruff: noqa: UP045  (fairseq and old omegaconf read Optional[X])
from argparse import Action, ArgumentParser, Namespace
from contextlib import nullcontext
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel, register_model
from fairseq.models.roberta import RobertaEncoder, RobertaModel
from fairseq.models.roberta.model import base_architecture
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from omegaconf import OmegaConf, open_dict

from normplugin.fairseq_plugin.scheme_options import (
    ACTIVATIONS,
    SIZES,
    SchemeConfig,
    about,
    left_to_architecture,
)
from normplugin.fairseq_plugin.sites import mark
from normplugin.fairseq_plugin.stacks import NormEncoder, Placing, placing_of


def _upstream_fields() -> list[tuple[str, Any, Any]]:
    """Return upstream's options of ``roberta``, which has no dataclass, as dataclass fields."""
    parser, defaults = ArgumentParser(add_help=False), Namespace()
    RobertaModel.add_args(parser)
    base_architecture(defaults)
    # Upstream takes the task's maximum where this is unset; the norm on the embeddings is ours.
    defaults.max_positions, defaults.layernorm_embedding = None, False
    return [_field(action, vars(defaults)) for action in parser._actions]


def _field(action: Action, defaults: dict[str, Any]) -> tuple[str, Any, Any]:
    default = defaults.get(action.dest, action.default)
    plain: Any = bool if action.const is True else action.type or str
    kind = Optional[plain] if default is None else plain
    return action.dest, kind, field(default=default, metadata=about(str(action.help)))


_RobertaConfig: Any = make_dataclass(
    "_RobertaConfig", _upstream_fields(), bases=(FairseqDataclass,)
)


@dataclass
@left_to_architecture(*(f"encoder_{size}" for size in SIZES))
class NormMaskedLanguageModelConfig(SchemeConfig, _RobertaConfig):
    """Upstream's options of ``roberta`` and ours."""

    activation_fn: ACTIVATIONS = field(  # type: ignore[valid-type]
        default="gelu", metadata=about("activation function to use")
    )
    checkpoint_activations: bool = field(
        default=False, metadata=about("recompute each layer in the backward pass: less memory")
    )
    offload_activations: bool = field(
        default=False, metadata=about("checkpoint activations and keep them on the CPU")
    )


class NormRobertaEncoder(RobertaEncoder):
    """Upstream's RoBERTa encoder on a stack of ours; its head keeps upstream's LayerNorm.

    Args:
        args: The model's config.
        dictionary: As upstream's.
        placing: The scheme and more.
    """

    def __init__(self, args, dictionary, placing: Placing):
        self.placing = placing
        super().__init__(args, dictionary)
        mark(self.lm_head.layer_norm)

    def build_encoder(self, args, dictionary, embed_tokens):
        """Upstream's method with our stack."""
        cfg = TransformerConfig.from_namespace(args)
        encoder = NormEncoder(cfg, self.placing, dictionary, embed_tokens)
        encoder.apply(init_bert_params)
        return encoder


@register_model("normplugin_mlm", dataclass=NormMaskedLanguageModelConfig)
class NormMaskedLanguageModel(RobertaModel):
    """fairseq's ``roberta`` with any `NormScheme`; ``preln`` is its ``roberta_prenorm``.

    With ``--embedding-norm``, ``postln`` is ``roberta_base`` and ``preln`` the same with
    ``--encoder-normalize-before``.
    """

    @classmethod
    def hub_models(cls):
        """No model is offered for download."""
        return {}

    @classmethod
    def add_args(cls, parser):
        """Upstream's are those of a model without a dataclass."""
        BaseFairseqModel.add_args.__func__(cls, parser)

    @classmethod
    def build_model(cls, args, task):
        """Build the model; the encoder compares what the scheme promises with what exists."""
        placing = placing_of(args, task, "masked_lm")
        if args.max_positions is None:  # 0.12.2's masked_lm task has no maximum
            args.max_positions = task.max_positions() or task.cfg.tokens_per_sample
        if args.offload_activations:
            args.checkpoint_activations = True
        # Upstream adds what it reads and does not declare.
        with open_dict(args) if OmegaConf.is_config(args) else nullcontext():
            return cls(args, NormRobertaEncoder(args, task.source_dictionary, placing))
