"""Builds the layers and models that are compared: fairseq's own, and ours, alike but for norms."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq import optim, options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import nn

import normplugin.fairseq_plugin  # noqa: F401  (registers)
from normplugin.fairseq_plugin.layers import DecoderLayer
from normplugin.placement import Dims, resolve_scheme

UPSTREAM_FLAGS = ("scale_attn", "scale_fc", "scale_heads")  # examples/normformer/train_lm.sh


@dataclass(frozen=True)
class Variant:
    """One contestant.

    Args:
        name: Its name in tables and records.
        scheme: Ours; None for upstream's layer.
        options: Of the scheme.
        recompute: --recompute-ffn-norm.
        flags: Upstream's NormFormer flags.
    """

    name: str
    scheme: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False
    flags: tuple[str, ...] = ()


STOCK, UPSTREAM_NORMFORMER = "stock preln", "stock normformer"
VARIANTS = (
    Variant(STOCK),
    Variant(UPSTREAM_NORMFORMER, flags=UPSTREAM_FLAGS),
    Variant("preln", "preln"),
    Variant("periln", "periln"),
    Variant("periln rmsnorm", "periln", {"norm_type": "rmsnorm"}),
    Variant("normformer", "normformer"),
    Variant("normformer recompute", "normformer", recompute=True),
    Variant("outputln", "outputln"),
    Variant("postln", "postln"),
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a case: the model's, and the batch's."""

    dims: Dims
    batch: int
    length: int
    vocabulary: int = 0  # 0: a single layer

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.batch * self.length

    def __str__(self) -> str:
        d = self.dims
        parts = [f"L{d.n_layers}"] if self.vocabulary else []
        parts += [f"d{d.d_model}", f"ffn{d.d_ffn}", f"h{d.n_heads}", f"{self.batch}x{self.length}"]
        return " ".join([*parts, f"V{self.vocabulary}"] if self.vocabulary else parts)


def build_layer(variant: Variant, dims: Dims) -> nn.Module:
    """A decoder layer without dropout and cross-attention, with GELU as in transformer_lm_gpt."""
    cfg = TransformerConfig()
    cfg.dropout = cfg.attention_dropout = cfg.activation_dropout = 0.0
    cfg.activation_fn = "gelu"
    cfg.decoder.embed_dim, cfg.decoder.ffn_embed_dim = dims.d_model, dims.d_ffn
    cfg.decoder.attention_heads = dims.n_heads
    cfg.decoder.normalize_before = True
    torch.manual_seed(0)
    if variant.scheme is None:
        return _upstream_layer(cfg, variant.flags)
    scheme = resolve_scheme(variant.scheme, **variant.options)
    cfg.decoder.normalize_before = "C" not in scheme.attention
    return DecoderLayer(cfg, scheme, True, variant.recompute)


def _upstream_layer(cfg, flags: tuple[str, ...]) -> nn.Module:
    """A plain namespace: upstream's own config classes drop the flags."""
    namespace = types.SimpleNamespace(**vars(cfg), **dict.fromkeys(flags, True))
    return TransformerDecoderLayerBase(namespace, no_encoder_attn=True)


@dataclass
class Training:
    """What a training step needs, built as fairseq-train builds it."""

    model: nn.Module
    criterion: nn.Module
    optimizer: Any


def build_training(variant: Variant, shape: Shape) -> Training:
    """The model, criterion and Adam that fairseq-train makes of a command line."""
    cfg = _parse(variant, shape)
    dictionary = Dictionary()
    for i in range(shape.vocabulary - len(dictionary)):
        dictionary.add_symbol(str(i))
    task = LanguageModelingTask(cfg.task, dictionary, dictionary)
    torch.manual_seed(0)
    model = task.build_model(cfg.model)
    if variant.flags:  # no command line reaches them
        decoder = model.decoder
        decoder.layers = nn.ModuleList(
            _upstream_layer(decoder.cfg, variant.flags) for _ in decoder.layers
        )
    model.train()
    optimizer = optim.build_optimizer(cfg.optimizer, list(model.parameters()))
    return Training(model, task.build_criterion(cfg.criterion), optimizer)


def _parse(variant: Variant, shape: Shape):
    """The settings fairseq-train makes of the variant's command line."""
    dims = shape.dims
    argv = ["data", "--task", "language_modeling", "--criterion", "cross_entropy"]
    argv += ["--arch", variant.scheme or "transformer_lm_gpt", "--share-decoder-input-output-embed"]
    argv += ["--decoder-layers", str(dims.n_layers), "--decoder-embed-dim", str(dims.d_model)]
    argv += ["--decoder-ffn-embed-dim", str(dims.d_ffn)]
    argv += ["--decoder-attention-heads", str(dims.n_heads)]
    argv += ["--dropout", "0", "--attention-dropout", "0"]
    argv += ["--tokens-per-sample", str(shape.length), "--optimizer", "adam", "--lr", "1e-4"]
    argv += ["--recompute-ffn-norm"] if variant.recompute else []
    for name, value in variant.options.items():
        argv += ["--" + name.replace("_", "-"), str(value)]
    args = options.parse_args_and_arch(options.get_training_parser(), argv)
    return convert_namespace_to_omegaconf(args)
