"""Measure a checkpoint: gradients, residual stream, sublayers and gains over depth.

    normplugin diagnose checkpoint_best.pt --data DIR       fairseq's file
    normplugin diagnose checkpoints --data DIR              Megatron's folder, or one iteration's

Runs the model forward and backward on batches of the validation set, without dropout, and prints a
table; --out also writes the records. Of Megatron, GPTs that one process can hold; during training:
its --diagnostics-interval, and 'python -m normplugin.diagnostics.fairseq_train'.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from normplugin.diagnostics import megatron_offline, records, table
from normplugin.diagnostics.options import DiagnosticsError
from normplugin.diagnostics.records import Record
from normplugin.errors import CheckpointError, DataError, MissingFrameworkError, NormPluginError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint, the data and how much of it."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a file or folder")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="of 'normplugin prepare' or fairseq"
    )
    parser.add_argument("--subset", default="valid", help="default: valid")
    parser.add_argument("--batches", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the records, JSON lines")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")


def run(args: argparse.Namespace) -> int:
    """Load, measure, print, write."""
    if args.batches < 1:
        raise DiagnosticsError(
            f"--batches: got {args.batches}; legal are numbers from 1 on. Try 8."
        )
    if args.out is not None and args.out.exists():
        raise DiagnosticsError(
            f"--out: got {args.out}, which exists; nothing is overwritten. Name another file."
        )
    found = _measure(args)
    measured = f"update {found[0].update}, {args.subset}, {args.batches} batches at most"
    print(f"{args.checkpoint}: {measured}")
    print(table.text(found))
    if args.out is not None:
        records.append(args.out, found)
    return 0


def _measure(args: argparse.Namespace) -> list[Record]:
    path = args.checkpoint
    if megatron_offline.is_checkpoint(path):
        import torch

        cpu = args.cpu or not torch.cuda.is_available()
        return megatron_offline.measure(path, args.data, args.subset, args.batches, cpu)
    model, task, cfg, update = _load(path, args.data)
    return _measure_fairseq(model, task, cfg, args, update)


def _load(path: Path, data: Path) -> tuple[Any, Any, Any, int]:
    """Return model, task, configuration and updates trained, by fairseq's own loader."""
    if path.is_dir() or not path.exists():
        raise CheckpointError(
            f"{path}: got no such file; legal are fairseq's checkpoint files and the folders that "
            "Megatron's --save names. Check the path."
        )
    try:
        import fairseq.checkpoint_utils as utils
    except ModuleNotFoundError as error:
        raise MissingFrameworkError(
            f"fairseq: it cannot be imported ({error}). Install it: "
            "pip install 'normplugin[fairseq]'."
        ) from None
    import normplugin.fairseq_plugin  # noqa: F401 -- registers our architectures

    folder = data / "fairseq" if (data / "fairseq").is_dir() else data
    if not any(folder.glob("dict.*")):
        raise DataError(
            f"--data: got {data}; it holds no fairseq data (a dict.txt, or one per language). "
            "Name a folder of 'normplugin prepare', or of fairseq-preprocess."
        )
    try:
        state = utils.load_checkpoint_to_cpu(str(path), {"data": str(folder)})
        updates = int(state["optimizer_history"][-1].get("num_updates", 0))
        models, cfg, task = utils.load_model_ensemble_and_task([str(path)], state=state)
    except NormPluginError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
        raise CheckpointError(
            f"{path}: fairseq cannot load it with --data {folder} ({reason}). It is damaged, or "
            "the data is not what it was trained on."
        ) from error
    return models[0], task, cfg, updates


def _measure_fairseq(model, task, cfg, args: argparse.Namespace, update: int) -> list[Record]:
    """Return the records of a forward and backward pass over the first batches of a subset."""
    import torch
    from fairseq import utils

    from normplugin.diagnostics.fairseq_map import map_model
    from normplugin.diagnostics.probe import Probe
    from normplugin.diagnostics.session import summarize

    cuda = torch.cuda.is_available() and not args.cpu
    model = (model.cuda() if cuda else model).float().eval()
    criterion = task.build_criterion(cfg.criterion).eval()
    probe, total = Probe(map_model(model)), 0.0
    batches = _batches(model, task, cfg, args.subset)
    probe.attach()
    for sample in itertools.islice(batches, args.batches):
        loss, sample_size, _ = criterion(model, utils.move_to_cuda(sample) if cuda else sample)
        loss.backward()
        total += float(sample_size)
    probe.detach()
    probe.add_gradients(lambda parameter: parameter.grad, 1.0 / total)
    probe.add_gains()
    return summarize(probe.read(), update)


def _batches(model, task, cfg, subset: str):
    from fairseq import utils

    try:
        task.load_dataset(subset)
    except FileNotFoundError as error:
        raise DataError(
            f"--subset: got {subset!r}; there is no such data ({error}). Legal are the splits of "
            "--data, such as train and valid."
        ) from None
    positions = utils.resolve_max_positions(task.max_positions(), model.max_positions())
    return task.get_batch_iterator(
        dataset=task.dataset(subset),
        max_tokens=cfg.dataset.max_tokens,
        max_sentences=cfg.dataset.batch_size,
        max_positions=positions,
        ignore_invalid_inputs=True,
    ).next_epoch_itr(shuffle=False)
