"""A checkpoint is resumed with the scheme it was trained with, or not at all.

Megatron saves its parsed arguments, ours among them, in every checkpoint. By default it ignores
tensors of a checkpoint that the model lacks, so that a Peri-LN checkpoint would load into a Pre-LN
model without a word.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

from normplugin.errors import CheckpointError, SchemeError
from normplugin.megatron_plugin.arguments import scheme_from_args
from normplugin.placement import NormScheme

_TRACKER = "latest_checkpointed_iteration.txt"
_SPECS = "normplugin.megatron_plugin.specs"


@functools.cache
def check_run(scheme: NormScheme) -> None:
    """Under Megatron's trainer, compare a layer's scheme with the checkpoint's; once per process.

    Raises:
        SchemeError: See `check_resume`.
    """
    if "megatron.training" not in sys.modules:
        return
    from megatron.training import get_args

    try:
        args = get_args()
    except AssertionError:  # imported, but no trainer is running
        return
    check_resume(args, scheme)


def check_resume(args: Any, scheme: NormScheme | None) -> None:
    """Compare this run's scheme with that of the checkpoint it will load, if there is one.

    Args:
        args: Megatron's arguments.
        scheme: This run's; None for Megatron's own model.

    Raises:
        SchemeError: If they compute different functions.
    """
    saved = saved_arguments(args)
    if saved is None:
        return
    theirs = _scheme_of(saved)
    if theirs is None and scheme is None:
        return
    mine = "Megatron's own model" if scheme is None else f"scheme {scheme.name!r}"
    other = "Megatron's own model" if theirs is None else f"scheme {theirs.name!r}"
    differences = _differences(scheme, theirs)
    if not differences:
        return
    raise SchemeError(
        f"--load: got a checkpoint of {other} in {_folder(args)} for {mine}; they differ in "
        f"{', '.join(differences)}. Give the options it was trained with, or another folder."
    )


def saved_arguments(args: Any) -> Any | None:
    """Return the arguments stored in the checkpoint that ``--load`` will find, or None.

    Raises:
        CheckpointError: If the checkpoint is there and cannot be read.
    """
    folder = _folder(args)
    if folder is None:
        return None
    from megatron.core import dist_checkpointing

    try:
        if dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
            return dist_checkpointing.load_common_state_dict(str(folder)).get("args")
        return _legacy_arguments(folder)
    except Exception as error:
        raise CheckpointError(
            f"--load: got {folder}, whose arguments cannot be read ({error}). "
            "Take another --ckpt-step, or another folder."
        ) from error


def _legacy_arguments(folder: Path) -> Any | None:
    """Those of ``--ckpt-format torch``: a pickle per rank, which Megatron reads the same way."""
    import torch

    for path in sorted(folder.glob("mp_rank_00*/model_optim_rng.pt")):
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True).get("args")
    return None


def _folder(args: Any) -> Path | None:
    """The folder of one iteration that Megatron will load."""
    if not args.load:
        return None
    root = Path(args.load)
    step = getattr(args, "ckpt_step", None)
    if step is None:
        tracker = root / _TRACKER
        if not tracker.is_file():
            return None
        step = tracker.read_text(encoding="utf-8").strip()
    folder = root / (step if step == "release" else f"iter_{int(step):07d}")
    return folder if folder.is_dir() else None


def _scheme_of(saved: Any) -> NormScheme | None:
    """The scheme of saved arguments: from our options, or from ``--spec`` with our constants."""
    name = getattr(saved, "norm_scheme", None)
    spec = list(getattr(saved, "spec", None) or [])
    if name is None and len(spec) == 2 and spec[0] == _SPECS:
        name = spec[1].replace("_", "+")
    if name is None:
        return None
    return scheme_from_args(argparse.Namespace(**{**vars(saved), "norm_scheme": name}))


def _differences(mine: NormScheme | None, theirs: NormScheme | None) -> list[str]:
    """Names of what differs; a model of Megatron's own has no scheme to compare."""
    if mine is None or theirs is None:
        known = mine or theirs
        return [] if known is None or _is_plain(known) else ["the norms of the scheme"]
    left, right = (_flat(scheme.identity()) for scheme in (mine, theirs))
    return [name for name in left if left[name] != right[name]]


def _flat(identity: dict[str, Any]) -> dict[str, Any]:
    """With the norm's type, eps and gain as entries of their own."""
    norm = {f"norm_{name}": value for name, value in identity["norm"].items()}
    return {**{name: value for name, value in identity.items() if name != "norm"}, **norm}


def _is_plain(scheme: NormScheme) -> bool:
    """True for Pre-LN as Megatron's own model has it, QK-norm per head included."""
    extra = scheme.ffn_hidden or scheme.residual_scale or scheme.embedding_norm
    plain = scheme.attention == scheme.ffn == "A" and scheme.head_scale == "none"
    return plain and not extra and scheme.qk_norm != "full"
