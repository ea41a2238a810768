"""Registers the architectures: ``<scheme><size>`` for ``--arch``."""

from __future__ import annotations

from argparse import Namespace

from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY, register_model_architecture

from normplugin.errors import NormPluginError, SchemeError
from normplugin.fairseq_plugin import masked_lm, models, translation
from normplugin.fairseq_plugin.defaults import apply_architecture
from normplugin.presets import ARCHITECTURES, Architecture

MODELS = {
    "causal_lm": ("normplugin_lm", models),
    "masked_lm": ("normplugin_mlm", masked_lm),
    "encoder_decoder": ("normplugin_mt", translation),
}


def _register(arch: Architecture) -> None:
    if arch.name in ARCH_MODEL_REGISTRY:
        raise NormPluginError(
            f"--arch {arch.name}: another plugin registered that name "
            f"({ARCH_MODEL_REGISTRY[arch.name].__module__}). Load only one of them."
        )

    @register_model_architecture(MODELS[arch.kind][0], arch.name)
    def configure(args: Namespace) -> None:
        try:
            apply_architecture(args, arch)
        except SchemeError as error:  # fairseq's parser is at work: end as a parser does
            raise SystemExit(f"normplugin: error: {error}") from None


# register_model does not complain about a name that is taken: it keeps the first class.
for _name, _module in MODELS.values():
    if MODEL_REGISTRY[_name].__module__ != _module.__name__:
        raise NormPluginError(
            f"model {_name!r}: another plugin registered that name "
            f"({MODEL_REGISTRY[_name].__module__}). Load only one of them."
        )
for _architecture in ARCHITECTURES.values():
    _register(_architecture)
