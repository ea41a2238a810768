"""Registers the architectures: ``<scheme><size>`` for ``--arch``."""

from __future__ import annotations

from argparse import Namespace

from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY, register_model_architecture
from fairseq.models.roberta.model import base_architecture as roberta
from fairseq.models.transformer import base_architecture as transformer
from fairseq.models.transformer_lm import transformer_lm_gpt
from fairseq.tasks import TASK_REGISTRY

from normplugin.errors import NormPluginError, SchemeError
from normplugin.fairseq_plugin import masked_lm, models, translation
from normplugin.fairseq_plugin.checks import check_task, check_upstream_options
from normplugin.fairseq_plugin.config import scheme_of
from normplugin.fairseq_plugin.layers import normalizes_before
from normplugin.placement import canonical_name
from normplugin.presets import ARCHITECTURES, Architecture

MODELS = {
    "causal_lm": ("normplugin_lm", models),
    "masked_lm": ("normplugin_mlm", masked_lm),
    "encoder_decoder": ("normplugin_mt", translation),
}
# Kind -> its stacks, and upstream's architecture that sets all but the sizes and the placement.
_UPSTREAM = {
    "causal_lm": (("decoder",), transformer_lm_gpt),
    "masked_lm": (("encoder",), roberta),
    "encoder_decoder": (("encoder", "decoder"), transformer),
}
_SIZES = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")  # in the order of `Dims`


def apply_architecture(args: Namespace, arch: Architecture) -> None:
    """Fill in the sizes and the scheme of an architecture, and check the mix.

    ``args`` holds only what the user typed (fairseq deletes the defaults), so whatever is set wins.

    Raises:
        SchemeError: See `check_upstream_options`; also for a scheme that contradicts the name.
    """
    task = TASK_REGISTRY.get(getattr(args, "task", ""))
    if task is not None:
        check_task(task, arch.kind, arch)
    args.norm_scheme = _scheme_name(getattr(args, "norm_scheme", None), arch)
    scheme = scheme_of(args)
    before = normalizes_before(scheme)
    sides, upstream = _UPSTREAM[arch.kind]
    for side in sides:
        _check_order(args, side, before)
        for name, size in zip(_SIZES, vars(arch.dims).values(), strict=True):
            _default(args, f"{side}_{name}", size)
    _default(args, "layernorm_embedding", False)  # upstream's RoBERTa says True
    upstream(args)  # dropout, activation and all the rest
    for side in sides:
        setattr(args, f"{side}_normalize_before", before)  # upstream's LM sets it to True
    check_upstream_options(args, scheme)


def _check_order(args: Namespace, side: str, before: bool) -> None:
    if getattr(args, f"{side}_normalize_before", False) and not before:
        raise SchemeError(
            f"--{side}-normalize-before: got True with scheme {args.norm_scheme!r}, which "
            "normalises after the residual add. Drop it, or take preln."
        )


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


def _default(args: Namespace, name: str, value: object) -> None:
    if getattr(args, name, None) is None:
        setattr(args, name, value)


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
