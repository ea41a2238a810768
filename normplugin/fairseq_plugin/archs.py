"""Registers the architectures: ``<scheme><size>`` for ``--arch``."""

from __future__ import annotations

from argparse import Namespace

from fairseq.models import ARCH_MODEL_REGISTRY, register_model_architecture
from fairseq.models.transformer_lm import transformer_lm_gpt

from normplugin.errors import NormPluginError, SchemeError
from normplugin.fairseq_plugin import models
from normplugin.fairseq_plugin.checks import check_task_name, check_upstream_options
from normplugin.fairseq_plugin.models import NormLanguageModel, scheme_of
from normplugin.placement import canonical_name
from normplugin.presets import ARCHITECTURES, Architecture

MODEL_NAME = "normplugin_lm"


def apply_architecture(args: Namespace, arch: Architecture) -> None:
    """Fill in the sizes and the scheme of an architecture, and check the mix.

    ``args`` holds only what the user typed (fairseq deletes the defaults), so whatever is set wins.

    Raises:
        SchemeError: See `check_upstream_options`; also for a scheme that contradicts the name.
    """
    check_task_name(getattr(args, "task", "language_modeling"), arch.name)
    args.norm_scheme = _scheme_name(getattr(args, "norm_scheme", None), arch)
    scheme = scheme_of(args)
    pre = "C" not in scheme.attention + scheme.ffn
    if getattr(args, "decoder_normalize_before", False) and not pre:
        raise SchemeError(
            f"--decoder-normalize-before: got True with scheme {scheme.name!r}, which normalises "
            "after the residual add. Drop it, or take preln."
        )
    _default(args, "decoder_layers", arch.dims.n_layers)
    _default(args, "decoder_embed_dim", arch.dims.d_model)
    _default(args, "decoder_ffn_embed_dim", arch.dims.d_ffn)
    _default(args, "decoder_attention_heads", arch.dims.n_heads)
    transformer_lm_gpt(args)  # dropout, activation and all the rest are upstream's
    args.decoder_normalize_before = pre
    check_upstream_options(args, scheme)


def _scheme_name(asked: str | None, arch: Architecture) -> str:
    """The user's scheme where the architecture leaves room for it.

    ``--arch preln_tiny --norm-scheme A+C`` takes a size with any scheme; the other names promise
    their own.
    """
    if asked is None:
        return arch.scheme
    name = canonical_name(asked)
    if arch.scheme not in ("preln", name):
        raise SchemeError(
            f"--norm-scheme: got {name!r} with --arch {arch.name}, whose name promises "
            f"{arch.scheme!r}. Take --arch {arch.name.replace(arch.scheme, 'preln')} with "
            "--norm-scheme, or drop the option."
        )
    return name


def _default(args: Namespace, name: str, value: int) -> None:
    if getattr(args, name, None) is None:
        setattr(args, name, value)


def _register(arch: Architecture) -> None:
    if arch.name in ARCH_MODEL_REGISTRY:
        raise NormPluginError(
            f"--arch {arch.name}: another plugin registered that name "
            f"({ARCH_MODEL_REGISTRY[arch.name].__module__}). Load only one of them."
        )

    @register_model_architecture(MODEL_NAME, arch.name)
    def configure(args: Namespace) -> None:
        try:
            apply_architecture(args, arch)
        except SchemeError as error:  # fairseq's parser is at work: end as a parser does
            raise SystemExit(f"normplugin: error: {error}") from None


# register_model does not complain about a name that is taken: it returns the first class.
if NormLanguageModel.__module__ != models.__name__:
    raise NormPluginError(
        f"model {MODEL_NAME!r}: another plugin registered that name "
        f"({NormLanguageModel.__module__}). Load only one of them."
    )
for _architecture in ARCHITECTURES.values():
    _register(_architecture)
