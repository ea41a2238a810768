"""The causal language model."""

# No postponed annotations: fairseq reads the types of dataclass fields.
from dataclasses import dataclass

from fairseq import options
from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from fairseq.modules import AdaptiveInput, CharacterTokenEmbedder

from normplugin.fairseq_plugin.scheme_options import SIZES, SchemeConfig, left_to_architecture
from normplugin.fairseq_plugin.stacks import NormDecoder, placing_of


@dataclass
@left_to_architecture(
    *(f"decoder_{size}" for size in SIZES),
    *("activation_fn", "attention_dropout", "decoder_input_dim", "decoder_output_dim"),
)
class NormLanguageModelConfig(SchemeConfig, TransformerLanguageModelConfig):
    """Upstream's options of ``transformer_lm`` and ours."""


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
        placing = placing_of(args, task, "causal_lm")
        if args.decoder_layers_to_keep:
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        if args.max_target_positions is None:
            args.max_target_positions = args.tokens_per_sample
        decoder = NormDecoder(
            TransformerConfig.from_namespace(args),
            placing,
            dictionary=task.target_dictionary,
            embed_tokens=cls._build_embedding(args, task),
            no_encoder_attn=True,
        )
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
