"""Fills in what an architecture decides and the user left open, on the command line or in hydra."""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext

from fairseq.models.roberta.model import base_architecture as roberta
from fairseq.models.transformer import base_architecture as transformer
from fairseq.models.transformer_lm import transformer_lm_gpt
from fairseq.tasks import TASK_REGISTRY
from omegaconf import DictConfig, OmegaConf, open_dict

from normplugin.errors import SchemeError
from normplugin.fairseq_plugin.checks import check_task, check_upstream_options
from normplugin.fairseq_plugin.layers import normalizes_before
from normplugin.fairseq_plugin.scheme_options import SIZES, scheme_of
from normplugin.placement import canonical_name
from normplugin.presets import ARCHITECTURES, Architecture

# Kind -> its stacks, and upstream's architecture that sets all but the sizes and the placement.
_UPSTREAM = {
    "causal_lm": (("decoder",), transformer_lm_gpt),
    "masked_lm": (("encoder",), roberta),
    "encoder_decoder": (("encoder", "decoder"), transformer),
}


def apply_architecture(args: Namespace | DictConfig, arch: Architecture) -> None:
    """Fill in the sizes and the scheme of an architecture, and check the mix.

    ``args`` holds what the user typed, and None or nothing where the architecture decides.

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
        for name, size in zip(SIZES, vars(arch.dims).values(), strict=True):
            _default(args, f"{side}_{name}", size)
        if side == "decoder":
            _default(args, "decoder_input_dim", args.decoder_embed_dim)
            _default(args, "decoder_output_dim", args.decoder_embed_dim)
    _default(args, "layernorm_embedding", False)  # upstream's RoBERTa says True
    upstream(args)  # dropout, activation and all the rest
    for side in sides:
        setattr(args, f"{side}_normalize_before", before)  # upstream's LM sets it to True
    check_upstream_options(args, scheme)


def complete(cfg, kind: str) -> None:
    """Fill in a config that names the model (``normplugin_lm``) and no architecture, as preln.

    Raises:
        SchemeError: As `apply_architecture`.
    """
    base = next(arch for arch in ARCHITECTURES.values() if arch.kind == kind)
    with open_dict(cfg) if OmegaConf.is_config(cfg) else nullcontext():
        apply_architecture(cfg, base)


def _check_order(args: Namespace | DictConfig, side: str, before: bool) -> None:
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


def _default(args: Namespace | DictConfig, name: str, value: object) -> None:
    if getattr(args, name, None) is None:
        setattr(args, name, value)
