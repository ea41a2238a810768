"""What a Megatron run says about itself: its log, and the index of its checkpoint.

The log has every argument that was in force, and losses in nats with seven digits. A validation
covers as many whole batches as its text fills, so that bits per byte are the mean loss of these
tokens over the bytes per token of the whole text.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normplugin.compare.frameworks import DIAGNOSTICS, LOG, Dataset
from normplugin.compare.record import Record, Score, Step, Trace, batches
from normplugin.data import manifest
from normplugin.errors import CompareError

CHECKPOINTS = "checkpoints"
_TRACKER = "latest_checkpointed_iteration.txt"
# What a record calls it -> Megatron's argument.
_SETTINGS = {
    "window": "seq_length",
    "batch size": "global_batch_size",
    "micro-batch size": "micro_batch_size",
    "updates": "train_iters",
    "seed": "seed",
    "tensor parallel": "tensor_model_parallel_size",
    "pipeline parallel": "pipeline_model_parallel_size",
    "sequence parallel": "sequence_parallel",
    "fp16": "fp16",
    "bf16": "bf16",
    "optimizer": "optimizer",
    "beta 1": "adam_beta1",
    "beta 2": "adam_beta2",
    "optimizer eps": "adam_eps",
    "weight decay": "weight_decay",
    "gradient clip": "clip_grad",
    "learning rate": "lr",
    "lowest learning rate": "min_lr",
    "schedule": "lr_decay_style",
    "warm-up updates": "lr_warmup_iters",
    "decay updates": "lr_decay_iters",
    "dropout": "hidden_dropout",
    "attention dropout": "attention_dropout",
    "layers": "num_layers",
    "width": "hidden_size",
    "ffn width": "ffn_hidden_size",
    "heads": "num_attention_heads",
    "position embedding": "position_embedding_type",
    "gated linear unit": "swiglu",
    "untied output": "untie_embeddings_and_output_weights",
}
_FOUND = ("data", "log base", "vocabulary", "tokens per update", "batches", "scored tokens")
FIELDS = (*_SETTINGS, *_FOUND)
_LINE = re.compile(
    r" iteration +(?P<update>\d+)/.*?elapsed time per iteration \(ms\): (?P<ms>\S+)"
    r".*?global batch size: +(?P<batch>\d+) \|(?: lm loss: (?P<loss>\S+))?[^\n]*\n"
    r"|validation loss at iteration (?P<at>\d+) \| lm loss value: (?P<score>\S+)[^\n]*\n"
)


def settings_facts(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts in a command line, or in the arguments of a log."""
    return {name: options.get(key) for name, key in _SETTINGS.items()}


def events(log: str) -> list[Step | Score]:
    """Return the training and validation lines of a log, or of a part of it."""
    window = int(_arguments(log).get("seq_length", 0))
    found: list[Step | Score] = []
    for match in _LINE.finditer(log):
        if match["at"]:
            found.append(Score(int(match["at"]), float(match["score"])))
            continue
        tokens = float(int(match["batch"]) * window)
        loss = float(match["loss"] or math.nan)  # Megatron leaves out what is not a number
        found.append(Step(int(match["update"]), tokens, float(match["ms"]) / 1000.0, loss))
    return found


def read(folder: Path, curves: Trace) -> Record:
    """Return the record of a finished run; raise `CompareError` where it does not hold one."""
    log = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    options = _arguments(log)
    if not options or not curves.valid or not math.isfinite(curves.valid[-1].loss):
        raise CompareError(
            f"{folder / LOG}: got a log without arguments or a finite validation loss; Megatron's "
            "trainer writes them. Run again with --force, or lower --lr if it diverged."
        )
    scored = int(options["eval_iters"]) * int(options["global_batch_size"])
    scored *= int(options["seq_length"])
    data = Path(options["train_data_path"].strip("[]'\"")).parent.parent
    vocabulary = re.search(r"padded vocab \(size: (\d+)\)", log)
    facts = settings_facts(options) | {
        "data": Dataset(data, manifest.load(data), "megatron").digest,
        "log base": _base(log),
        "vocabulary": vocabulary and int(vocabulary[1]),
        "tokens per update": [[point.update, point.tokens] for point in curves.train],
        "batches": batches(folder / DIAGNOSTICS),
        "scored tokens": scored,
    }
    scheme = options.get("norm_scheme", "None")
    return Record(
        facts=facts,
        model="GPTModel",
        scheme=None if scheme == "None" else scheme,
        parameters=_parameters(_last(folder / CHECKPOINTS)),
        loss=curves.valid[-1].loss,
        scored=scored,
        peak_memory_bytes=_device_memory(log),
    )


def done(folder: Path) -> int:
    """Return the updates in the checkpoint that a run goes on from."""
    try:
        return int(_last(folder / CHECKPOINTS).name.removeprefix("iter_"))
    except CompareError:
        return 0


def mend(folder: Path) -> None:
    """Nothing to mend: Megatron names a checkpoint in its tracker only when it is whole."""


def tidy(folder: Path) -> None:
    """Delete all but the last checkpoint of a run that has finished, and the samples' index."""
    last = _last(folder / CHECKPOINTS)
    for path in (folder / CHECKPOINTS).glob("iter_*"):
        if path != last:
            shutil.rmtree(path)
    shutil.rmtree(folder / "cache", ignore_errors=True)


def _arguments(log: str) -> dict[str, str]:
    """Return the arguments that Megatron printed last, by name."""
    block = log.rpartition("- arguments -")[2].partition("- end of arguments -")[0]
    return dict(re.findall(r"^ +(\w+) \.* ?(.*)$", block, re.MULTILINE)) if block != log else {}


def _base(log: str) -> float | None:
    """Return e where the last loss and its perplexity agree on it."""
    pairs = re.findall(r"lm loss value: (\S+) \| lm loss PPL: (\S+)", log)
    loss, perplexity = map(float, pairs[-1])
    return math.e if math.isclose(math.exp(min(loss, 20.0)), perplexity, rel_tol=1e-3) else None


def _last(checkpoints: Path) -> Path:
    try:
        return checkpoints / f"iter_{int((checkpoints / _TRACKER).read_text()):07d}"
    except (OSError, ValueError):
        raise CompareError(
            f"{checkpoints}: got no checkpoint; the trainer writes one at the end. Run again "
            "with --force."
        ) from None


def _parameters(checkpoint: Path) -> int:
    """Return the parameters of the whole model, whatever the layout: the checkpoint's index."""
    from torch.distributed.checkpoint import FileSystemReader

    tensors = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return sum(
        math.prod(item.size)
        for name, item in tensors.items()
        if hasattr(item, "size") and not name.startswith("optimizer.")
    )


def _device_memory(log: str) -> int | None:
    """Return the most that was allocated on the first rank's GPU."""
    found = [float(x) for x in re.findall(r"\| max allocated: ([\d.]+)", log)]
    return round(max(found) * 2**20) if found and max(found) > 0 else None
