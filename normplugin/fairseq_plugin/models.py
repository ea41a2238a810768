"""The causal language model: config, decoder, model.

The scheme reaches the layers as an argument, from our own config. It never travels through
``TransformerConfig.from_namespace``, which drops unknown keys of a DictConfig silently (that is
how upstream's own ``--scale-*`` flags came to do nothing).
"""

# No postponed annotations: fairseq reads the types of dataclass fields.
import logging
from dataclasses import dataclass, field
from typing import Optional

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import fsdp_wrap
from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig, TransformerDecoderBase
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from fairseq.modules import AdaptiveInput, CharacterTokenEmbedder
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.utils import get_available_activation_fns

from normplugin.fairseq_plugin import checkpoint
from normplugin.fairseq_plugin.checks import check_task, check_upstream_options
from normplugin.fairseq_plugin.layers import DecoderLayer
from normplugin.fairseq_plugin.sites import check_promises, promised_layer, promised_stack
from normplugin.norms import Norm
from normplugin.placement import (
    HEAD_SCALES,
    NORM_TYPES,
    QK_NORMS,
    SCHEMES,
    Dims,
    NormScheme,
    resolve_scheme,
)

logger = logging.getLogger(__name__)
ACTIVATIONS = [*get_available_activation_fns(), "relu_squared"]


def _help(text: str, legal: tuple[str, ...] = ()) -> dict[str, str]:
    return {"help": text + (f" ({', '.join(legal)})" if legal else "")}


@dataclass
class NormLanguageModelConfig(TransformerLanguageModelConfig):
    """Upstream's options of ``transformer_lm`` and ours."""

    # Upstream implements relu_squared (NormFormer's 2.7B recipe) and does not let it be chosen.
    activation_fn: ChoiceEnum(ACTIVATIONS) = field(  # type: ignore[valid-type]
        default="relu", metadata=_help("activation function to use")
    )
    norm_scheme: str = field(
        default="preln", metadata=_help("where norms and learned scales sit", SCHEMES)
    )
    norm_type: Optional[str] = field(
        default=None, metadata=_help("norm at every site; default layernorm", NORM_TYPES)
    )
    norm_eps: Optional[float] = field(
        default=None, metadata=_help("added to the variance of every norm; default 1e-5")
    )
    norm_zero_centered: bool = field(
        default=False, metadata=_help("store norm gains as offsets from 1")
    )
    head_scale: Optional[str] = field(
        default=None, metadata=_help("learned scale per head; default: the scheme's", HEAD_SCALES)
    )
    residual_scale: bool = field(
        default=False, metadata=_help("learn a vector on the FFN's skip path (ResScale)")
    )
    qk_norm: Optional[str] = field(
        default=None, metadata=_help("norm of queries and keys; default: the scheme's", QK_NORMS)
    )
    embedding_norm: bool = field(default=False, metadata=_help("norm on the embeddings"))
    output_norm_init: Optional[float] = field(
        default=None, metadata=_help("starting gain of the output norms; default 1")
    )
    recompute_ffn_norm: bool = field(
        default=False,
        metadata=_help("rebuild the FFN's normalised activation in the backward: less memory"),
    )


def scheme_of(cfg) -> NormScheme:
    """Return the checked scheme of a model config or of parsed arguments."""
    return resolve_scheme(
        getattr(cfg, "norm_scheme", "preln"),
        norm_type=getattr(cfg, "norm_type", None),
        norm_eps=getattr(cfg, "norm_eps", None),
        norm_zero_centered=getattr(cfg, "norm_zero_centered", False),
        head_scale=getattr(cfg, "head_scale", None),
        residual_scale=getattr(cfg, "residual_scale", False),
        qk_norm=getattr(cfg, "qk_norm", None),
        embedding_norm=getattr(cfg, "embedding_norm", False),
        output_norm_init=getattr(cfg, "output_norm_init", None),
    )


def dims_of_decoder(cfg: TransformerConfig) -> Dims:
    """Return the sizes of a decoder."""
    return Dims(
        n_layers=cfg.decoder.layers,
        d_model=cfg.decoder.embed_dim,
        d_ffn=cfg.decoder.ffn_embed_dim,
        n_heads=cfg.decoder.attention_heads,
    )


class NormDecoder(TransformerDecoderBase):
    """Upstream's decoder with layers, embedding norm and final norm of a scheme.

    Args:
        cfg: fairseq's TransformerConfig.
        scheme: The placement.
        recompute_ffn_norm: See `DecoderLayer`.
        kwargs: As upstream's.
    """

    def __init__(self, cfg, scheme: NormScheme, recompute_ffn_norm: bool = False, **kwargs):
        self.scheme = scheme
        self.recompute_ffn_norm = recompute_ffn_norm
        cfg.decoder.normalize_before = "C" not in scheme.attention + scheme.ffn
        super().__init__(cfg, **kwargs)
        self.layernorm_embedding = self._stack_norm(scheme.embedding_norm)
        self.layer_norm = self._stack_norm(scheme.final_norm)
        check_promises(scheme, promised_stack(scheme, dims_of_decoder(cfg)), self)
        checkpoint.add_card(self, checkpoint.Card(scheme, dims_of_decoder(cfg), "causal_lm"))

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        """Upstream's method (0.12.3 transformer_decoder.py) with our layer class."""
        layer = DecoderLayer(cfg, self.scheme, no_encoder_attn, self.recompute_ffn_norm)
        check_promises(self.scheme, promised_layer(self.scheme, dims_of_decoder(cfg)), layer)
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        min_params = 0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
        return fsdp_wrap(layer, min_num_params=min_params)

    def upgrade_state_dict_named(self, state_dict, name):
        """Check that a checkpoint holds this architecture, before it is loaded."""
        state_dict = super().upgrade_state_dict_named(state_dict, name)
        checkpoint.check_state(self, state_dict, name)
        return state_dict

    def _stack_norm(self, wanted: bool) -> Norm | None:
        return Norm(self.embed_dim, self.scheme.norm) if wanted else None


@register_model("normplugin_lm", dataclass=NormLanguageModelConfig)
class NormLanguageModel(TransformerLanguageModel):
    """fairseq's ``transformer_lm`` with any `NormScheme`; ``preln`` is bit-identical to it."""

    @classmethod
    def hub_models(cls):
        """No model is offered for download."""
        return {}

    @classmethod
    def build_model(cls, args, task):
        """Build the model; the decoder compares what the scheme promises with what exists."""
        scheme = scheme_of(args)
        check_task(task)
        check_upstream_options(args, scheme)
        if args.decoder_layers_to_keep:
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        if args.max_target_positions is None:
            args.max_target_positions = args.tokens_per_sample
        decoder = NormDecoder(
            TransformerConfig.from_namespace(args),
            scheme,
            recompute_ffn_norm=args.recompute_ffn_norm,
            dictionary=task.target_dictionary,
            embed_tokens=cls._build_embedding(args, task),
            no_encoder_attn=True,
        )
        logger.info("norm scheme %s, architecture hash %s", scheme.name, decoder.card.hash)
        return cls(decoder)

    @classmethod
    def _build_embedding(cls, args, task):
        """The embedding part of upstream's build_model (0.12.3 transformer_lm.py)."""
        dictionary = task.source_dictionary
        if args.character_embeddings:
            return CharacterTokenEmbedder(
                dictionary,
                eval(args.character_filters),
                args.character_embedding_dim,
                args.decoder_embed_dim,
                args.char_embedder_highway_layers,
            )
        if args.adaptive_input:
            return AdaptiveInput(
                len(dictionary),
                dictionary.pad(),
                args.decoder_input_dim,
                args.adaptive_input_factor,
                args.decoder_embed_dim,
                options.eval_str_list(args.adaptive_input_cutoff, type=int),
                args.quant_noise_pq,
                args.quant_noise_pq_block_size,
            )
        return cls.build_embedding(args, dictionary, args.decoder_input_dim)


def build_from_arguments(argv: list[str], device: str = "meta") -> NormLanguageModel:
    """Build the model ``fairseq-train`` builds from these options, with an empty dictionary.

    On the default device no memory is taken, so that the largest architecture can be looked at.
    """
    parser = options.get_training_parser(default_task="language_modeling")
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, ["", *argv]))
    task = LanguageModelingTask(cfg.task, Dictionary(), Dictionary())
    with torch.device(device):
        return task.build_model(cfg.model)
