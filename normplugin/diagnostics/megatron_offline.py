"""Measure a Megatron checkpoint: one training step of its own trainer, with nothing kept of it.

`measure` starts the trainer on one process, in fp32, with the model that the checkpoint's own
arguments describe; the trainer's process is this module too. Dropout is off, the gradients are
measured in front of the optimizer, and no checkpoint is written.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from normplugin.diagnostics import records
from normplugin.diagnostics.options import DiagnosticsError
from normplugin.diagnostics.records import BATCHES, Record
from normplugin.errors import CheckpointError, DataError, MissingFrameworkError
from normplugin.megatron_plugin.arguments import NAMES, flag_of

_MODULE = "normplugin.diagnostics.megatron_offline"
_TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7})")
_ERROR = re.compile(r"^(?:\[\w+\]: *)?(?:\w+\.)*\w*Error\b|\berror: ", re.MULTILINE)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is Megatron's: one iteration, or what --save named."""
    return path.is_dir() and bool(_ITERATION.fullmatch(path.name) or (path / _TRACKER).is_file())


def measure(path: Path, data: Path, subset: str, batches: int, cpu: bool) -> list[Record]:
    """Return the records of a checkpoint, of the iteration it was written at.

    Args:
        path: As for `is_checkpoint`.
        data: Of ``normplugin prepare``.
        subset: Split of the data; which of its windows are taken, the checkpoint's seed decides.
        batches: How many, each of the checkpoint's micro-batch size.
        cpu: Emulate CUDA on the CPU, as is done where there is no GPU.

    Raises:
        CheckpointError: It cannot be read, or needs more than one process.
        DataError: The split or the vocabulary is not there.
        DiagnosticsError: The trainer failed.
        MissingFrameworkError: There is no Megatron.
    """
    files, tokenizer = _files(data, subset)
    root, update = _place(path)
    saved = _saved(root, update)
    words = _model(saved, root, update)
    words += _run(saved, batches)
    words += ["--train-data-path", str(files), "--tokenizer-model", str(tokenizer)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "diagnostics.jsonl"
        words += ["--data-cache-path", folder, "--diagnostics-file", str(file)]
        _train([*words, *(["--cpu-emulation"] if cpu else [])])
        found = [record for record in records.read(file)[0] if record.name != BATCHES]
    return [dataclasses.replace(record, update=update) for record in found]


def _files(data: Path, subset: str) -> tuple[Path, Path]:
    """Return the prefix of the split's files, and the tokenizer."""
    prefix, tokenizer = data / "megatron" / f"{subset}_text_document", data / "spm.model"
    for needed in (prefix.with_suffix(".bin"), prefix.with_suffix(".idx"), tokenizer):
        if not needed.is_file():
            raise DataError(
                f"--data: got {data}; it has no {needed.relative_to(data)}. Prepare it with "
                "--frameworks megatron, or take another --subset."
            )
    return prefix.resolve(), tokenizer.resolve()


def _place(path: Path) -> tuple[Path, int]:
    """Return the folder of all iterations, and which one."""
    path = path.resolve()
    named = _ITERATION.fullmatch(path.name)
    if named:
        return path.parent, int(named[1])
    step = (path / _TRACKER).read_text(encoding="utf-8").strip()
    if not step.isdigit():
        raise CheckpointError(
            f"{path}: got iteration {step!r}; legal are numbers. Name the folder of an iteration."
        )
    return path, int(step)


def _saved(root: Path, update: int) -> Any:
    """Return the arguments that the checkpoint was trained with."""
    from normplugin.megatron_plugin.resume import saved_arguments

    wanted = argparse.Namespace(load=str(root), pretrained_checkpoint=None, ckpt_step=update)
    try:
        with warnings.catch_warnings(action="ignore"):  # of packages that Megatron would like
            saved = saved_arguments(wanted)
    except ModuleNotFoundError as error:
        raise MissingFrameworkError(
            f"megatron: it cannot be imported ({error}). Install it: "
            "pip install 'normplugin[megatron]'."
        ) from None
    if saved is None:
        raise CheckpointError(
            f"{root}: got no arguments of iteration {update}; Megatron's trainer saves them. "
            "Take a checkpoint that it wrote."
        )
    ranks = saved.tensor_model_parallel_size * saved.pipeline_model_parallel_size
    if saved.ckpt_format == "torch" and ranks > 1:
        raise CheckpointError(
            f"{root}: got --ckpt-format torch of {ranks} ranks; one process reads torch_dist only. "
            "Train on from it with --diagnostics-interval."
        )
    return saved


def _model(saved: Any, root: Path, update: int) -> list[str]:
    """Return the options of the model; Megatron takes its own from the checkpoint."""
    words = ["--load", str(root), "--ckpt-step", str(update), "--use-checkpoint-args"]
    words += ["--finetune", "--no-load-optim", "--no-load-rng"]
    for name in NAMES if getattr(saved, "norm_scheme", None) else ():
        value = getattr(saved, name, None)
        if value not in (None, False):
            words += [flag_of(name)] if value is True else [flag_of(name), str(value)]
    return words


def _run(saved: Any, batches: int) -> list[str]:
    """Return the options of one step."""
    size = saved.micro_batch_size
    return [
        *("--micro-batch-size", str(size), "--global-batch-size", str(size * batches)),
        *("--train-iters", "1", "--lr", "0.0", "--min-lr", "0.0", "--seed", str(saved.seed)),
        *("--eval-iters", "0", "--log-interval", "1", "--num-workers", "0"),
        *("--tokenizer-type", "SentencePieceTokenizer"),
        "--no-use-tokenizer-model-from-checkpoint-args",
        *("--diagnostics-interval", "1"),
    ]


def _train(words: list[str]) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    ended = subprocess.run(
        [*launch, "-m", _MODULE, *words], capture_output=True, text=True, errors="replace"
    )
    if ended.returncode:
        lines = [*filter(str.strip, (ended.stdout + ended.stderr).splitlines())]
        told = [line for line in lines if _ERROR.search(line) and "ChildFailed" not in line]
        raise DiagnosticsError(
            f"{words[1]}: Megatron's trainer ended with exit status {ended.returncode} and said: "
            f"{(told or lines or ['nothing'])[-1].strip()[:300]}"
        )


def main() -> int:
    """The trainer's process."""
    from normplugin.megatron_plugin.launch import reported
    from normplugin.megatron_plugin.pretrain_gpt import train

    return reported(_MODULE, lambda: train(sys.argv[1:], _watch))


def _watch(ours: argparse.Namespace) -> None:
    from normplugin.diagnostics import megatron_train

    megatron_train.install(1, Path(ours.diagnostics_file), dropout=False)


if __name__ == "__main__":
    sys.exit(main())
