"""A checkpoint is resumed with the scheme it was trained with, or not at all.

Megatron saves its parsed arguments, ours among them, in every checkpoint. By default it ignores
tensors of a checkpoint that the model lacks, so that a Peri-LN checkpoint would load into a Pre-LN
model without a word.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from normplugin.errors import CheckpointError, SchemeError
from normplugin.megatron_plugin.arguments import WARM_START, scheme_from_args
from normplugin.placement import NormScheme

_TRACKER = "latest_checkpointed_iteration.txt"
_SPECS = "normplugin.megatron_plugin.specs"


@functools.cache
def check_run(scheme: NormScheme) -> bool:
    """Under Megatron's trainer, compare a layer's scheme with the checkpoint's; once per process.

    Returns:
        True for a warm start: see `check_resume`.

    Raises:
        SchemeError: See `check_resume`.
    """
    if "megatron.training" not in sys.modules:
        return False
    from megatron.training import get_args

    try:
        args = get_args()
    except AssertionError:  # imported, but no trainer is running
        return False
    return check_resume(args, scheme)


def check_resume(args: Any, scheme: NormScheme | None) -> bool:
    """Compare this run's scheme with that of the checkpoint it will load, if there is one.

    Args:
        args: Megatron's arguments.
        scheme: This run's; None for Megatron's own model.

    Returns:
        True if the checkpoint is one of Pre-LN, asked for with ``--norm-warm-start``, and lacks
        tensors that the scheme adds.

    Raises:
        SchemeError: If they compute different functions.
    """
    saved = saved_arguments(args)
    if saved is None:
        return False
    theirs = _scheme_of(saved)
    differences = _differences(scheme, theirs)
    if not differences:
        return False
    mine = "Megatron's own model" if scheme is None else f"scheme {scheme.name!r}"
    other = "Megatron's own model" if theirs is None else f"scheme {theirs.name!r}"
    got = f"{_option(args)}: got a checkpoint of {other} in {_folder(args)} for {mine}"
    if not (_is_pretrained(args) and getattr(args, WARM_START, False)):
        raise SchemeError(
            f"{got}; they differ in {', '.join(differences)}. Give the options it was trained "
            "with, or another folder."
        )
    if scheme is None or not (theirs is None or _is_plain(theirs)) or not _contains_preln(scheme):
        raise SchemeError(
            f"{got}; a warm start needs a checkpoint of Pre-LN and a scheme that adds to it. "
            "Take periln or normformer without an embedding norm, or start afresh."
        )
    return True


def report_fresh(names: Collection[str], layer: Any, incompatible_keys: Any) -> None:
    """Take a scheme's own tensors off the list of the missing ones, and print them once.

    Args:
        names: Of the tensors that the scheme adds, below the layer.
        layer: The layer that has loaded what the checkpoint has of it.
        incompatible_keys: torch's; its list of missing keys is shortened in place.
    """
    missing = incompatible_keys.missing_keys
    fresh = [name for name in names if any(key.endswith(f".{name}") for key in missing)]
    missing[:] = [key for key in missing if not key.endswith(tuple(f".{n}" for n in names))]
    if fresh:
        _print_fresh(tuple(fresh))


@functools.cache
def _print_fresh(names: tuple[str, ...]) -> None:
    from megatron.training import print_rank_0

    print_rank_0(f"> warm start: not in the checkpoint, fresh in every layer: {', '.join(names)}")


def saved_arguments(args: Any) -> Any | None:
    """Return the arguments stored in the checkpoint that Megatron will load, or None.

    Raises:
        CheckpointError: If the checkpoint is there and cannot be read.
    """
    folder = _folder(args)
    if folder is None:
        return None
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint import CheckpointException

    try:
        if dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
            _check_sizes(folder)
            return dist_checkpointing.load_common_state_dict(str(folder)).get("args")
        return _legacy_arguments(folder)
    except (Exception, CheckpointException) as error:  # theirs is a BaseException
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{_option(args)}: got {folder}, which cannot be read ({reason}). "
            "Take another --ckpt-step, or another folder."
        ) from error


def _check_sizes(folder: Path) -> None:
    """Raise ValueError for a data file that is shorter than what the metadata says is in it."""
    if not (folder / ".metadata").is_file():
        return  # not of torch_dist
    from torch.distributed.checkpoint import FileSystemReader

    ends: dict[str, int] = {}
    for info in (FileSystemReader(folder).read_metadata().storage_data or {}).values():
        name, end = info.relative_path, info.offset + info.length
        ends[name] = max(end, ends.get(name, 0))
    for name, end in sorted(ends.items()):
        size = (folder / name).stat().st_size
        if size < end:
            raise ValueError(f"{name} has {size} bytes of at least {end}")


def _legacy_arguments(folder: Path) -> Any | None:
    """Those of ``--ckpt-format torch``: a pickle per rank, which Megatron reads the same way."""
    import torch

    for path in sorted(folder.glob("mp_rank_00*/model_optim_rng.pt")):
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True).get("args")
    return None


def _folder(args: Any) -> Path | None:
    """The folder of one iteration that Megatron will load."""
    load = args.pretrained_checkpoint if _is_pretrained(args) else args.load
    if not load:
        return None
    root = Path(load)
    step = getattr(args, "ckpt_step", None)
    if step is None:
        tracker = root / _TRACKER
        if not tracker.is_file():
            return None
        step = tracker.read_text(encoding="utf-8").strip()
    folder = root / (step if step == "release" else f"iter_{int(step):07d}")
    return folder if folder.is_dir() else None


def _is_pretrained(args: Any) -> bool:
    """True where Megatron starts from ``--pretrained-checkpoint``: nothing is in ``--load``."""
    if getattr(args, "pretrained_checkpoint", None) is None:
        return False
    return not args.load or not Path(args.load, _TRACKER).is_file()


def _option(args: Any) -> str:
    return "--pretrained-checkpoint" if _is_pretrained(args) else "--load"


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
    if mine is None or theirs is None:  # or both
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


def _contains_preln(scheme: NormScheme) -> bool:
    """True if the scheme keeps every norm of Pre-LN in its place and its checkpoint key."""
    letters = (scheme.attention, scheme.ffn)
    inputs = all("A" in each and "C" not in each for each in letters)
    return inputs and not scheme.embedding_norm
