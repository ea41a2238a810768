"""Builds fairseq layers and models the way fairseq does, for the tests in this folder."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models.transformer import TransformerConfig
from fairseq.tasks import TASK_REGISTRY
from torch._subclasses.fake_tensor import FakeTensorMode

import normplugin.fairseq_plugin  # noqa: F401  (registers)
from normplugin.fairseq_plugin.layers import DecoderLayer, EncoderLayer
from normplugin.placement import Dims, NormScheme

DIMS = Dims(n_layers=2, d_model=24, d_ffn=40, n_heads=4)


def layer_config(scheme: NormScheme | None = None, dims: Dims = DIMS, **changes):
    """fairseq's TransformerConfig of one layer, without dropout."""
    cfg = TransformerConfig()
    cfg.dropout = cfg.attention_dropout = cfg.activation_dropout = 0.0
    cfg.activation_fn = "tanh"  # the smooth one that fairseq does not compute in fp32
    cfg.decoder.embed_dim = cfg.encoder.embed_dim = dims.d_model
    cfg.decoder.ffn_embed_dim = cfg.encoder.ffn_embed_dim = dims.d_ffn
    cfg.decoder.attention_heads = cfg.encoder.attention_heads = dims.n_heads
    before = scheme is None or "C" not in scheme.attention
    cfg.decoder.normalize_before = cfg.encoder.normalize_before = before
    for name, value in changes.items():
        setattr(cfg, name, value)
    return cfg


def build_layer(scheme: NormScheme, no_encoder_attn: bool = True, recompute: bool = False, **cfg):
    """A fp64 decoder layer of ours; ``cfg`` as `layer_config` takes it."""
    return DecoderLayer(layer_config(scheme, **cfg), scheme, no_encoder_attn, recompute).double()


def build_encoder_layer(scheme: NormScheme, recompute: bool = False, **cfg):
    """A fp64 encoder layer of ours; ``cfg`` as `layer_config` takes it."""
    return EncoderLayer(layer_config(scheme, **cfg), scheme, recompute).double()


def parse(*argv: str):
    """What ``fairseq-train`` makes of a command line."""
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, ["data", *argv])
    return convert_namespace_to_omegaconf(args)


def build_model(*argv: str, seed: int = 0, symbols: int = 60, fake: bool = False):
    """The model ``fairseq-train`` builds from a command line, with a dictionary of numbers.

    The task is a language model's unless the command line says another; a fake model has no values.
    """
    task = argv[argv.index("--task") + 1] if "--task" in argv else "language_modeling"
    window = [] if task == "translation" else ["--tokens-per-sample", "32"]
    cfg = parse("--task", task, *window, *argv)
    dictionary = Dictionary()
    for i in range(symbols):
        dictionary.add_symbol(str(i))
    dictionaries = [dictionary] * (1 if task == "masked_lm" else 2)
    torch.manual_seed(seed)
    empty = FakeTensorMode() if task == "masked_lm" else torch.device("meta")  # the faster one
    with empty if fake else nullcontext():
        return TASK_REGISTRY[task](cfg.task, *dictionaries).build_model(cfg.model)
