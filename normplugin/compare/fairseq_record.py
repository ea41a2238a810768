"""What a fairseq run says about itself: its log and its checkpoint.

The log has the model, the vocabulary, the parameters and, for every log interval and validation,
losses with three decimals. The checkpoint has the configuration that was in force, the updates
done, and the meters of the trainer: sums of losses, with the exact number of target tokens, each
document's eos included. The base of the logarithm is told by a loss and its perplexity.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normplugin.compare.frameworks import DIAGNOSTICS, LOG, Dataset
from normplugin.compare.record import Record, Score, Step, Trace, batches
from normplugin.data import manifest
from normplugin.errors import CompareError

CHECKPOINT = "checkpoint_last.pt"
# Between logger and message: " | " as fairseq_cli.train sets it up, ":" where another did before.
_STATS = re.compile(r"\b(train_inner|valid)(?: \| |:)(\{.*\})\s*$", re.MULTILINE)
# What a record calls it -> section and key of fairseq's configuration.
_SETTINGS = {
    "window": ("task", "tokens_per_sample"),
    "sample break mode": ("task", "sample_break_mode"),
    "bos token": ("task", "add_bos_token"),
    "batch size": ("dataset", "batch_size"),
    "tokens per batch": ("dataset", "max_tokens"),
    "validation batch size": ("dataset", "batch_size_valid"),
    "validation steps": ("dataset", "max_valid_steps"),
    "training split": ("dataset", "train_subset"),
    "validation split": ("dataset", "valid_subset"),
    "update frequency": ("optimization", "update_freq"),
    "updates": ("optimization", "max_update"),
    "seed": ("common", "seed"),
    "loss": ("criterion", "_name"),
    "label smoothing": ("criterion", "label_smoothing"),
    "fp16": ("common", "fp16"),
    "bf16": ("common", "bf16"),
    "on the CPU": ("common", "cpu"),
    "optimizer": ("optimizer", "_name"),
    "betas": ("optimizer", "adam_betas"),
    "optimizer eps": ("optimizer", "adam_eps"),
    "weight decay": ("optimizer", "weight_decay"),
    "gradient clip": ("optimization", "clip_norm"),
    "learning rate": ("optimization", "lr"),
    "schedule": ("lr_scheduler", "_name"),
    "warm-up updates": ("lr_scheduler", "warmup_updates"),
    "dropout": ("model", "dropout"),
    "attention dropout": ("model", "attention_dropout"),
    "activation": ("model", "activation_fn"),
    "encoder layers": ("model", "encoder_layers"),
    "encoder width": ("model", "encoder_embed_dim"),
    "encoder ffn width": ("model", "encoder_ffn_embed_dim"),
    "encoder heads": ("model", "encoder_attention_heads"),
    "decoder layers": ("model", "decoder_layers"),
    "decoder width": ("model", "decoder_embed_dim"),
    "decoder ffn width": ("model", "decoder_ffn_embed_dim"),
    "decoder heads": ("model", "decoder_attention_heads"),
}
_FOUND = ("data", "log base", "vocabulary", "trained tokens", "tokens per update")
FIELDS = (*_SETTINGS, *_FOUND, "batches", "place in the data", "scored tokens")


def settings_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that a configuration decides, before or after a run."""
    folder = Path(config["task"]["data"]).parent
    data = Dataset(folder, manifest.load(folder), "fairseq")
    return {
        "data": data.digest,
        **{name: _value(config, *place) for name, place in _SETTINGS.items()},
    }


def events(log: str) -> list[Step | Score]:
    """Return the training and validation lines of a log, or of a part of it."""
    found: list[Step | Score] = []
    for match in _STATS.finditer(log):
        line = json.loads(match[2])
        if match[1] == "valid":
            found.append(Score(int(line["valid_num_updates"]), _nats(line, "valid_")))
            continue
        speed, tokens = float(line["wps"]), float(line["wpb"])
        # A validation and a checkpoint are in the time of the interval behind them.
        alone = speed > 0 and not (found and isinstance(found[-1], Score))
        seconds = tokens / speed if alone else None
        found.append(Step(int(line["num_updates"]), tokens, seconds, _nats(line)))
    return found


def read(folder: Path, curves: Trace) -> Record:
    """Return the record of a finished run; raise `CompareError` where it does not hold one."""
    log = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    state = _checkpoint(folder / CHECKPOINT)
    lines = [(match[1], json.loads(match[2])) for match in _STATS.finditer(log)]
    scores = [line for kind, line in lines if kind == "valid"]
    if not scores:
        raise _lacks("a validation", folder)
    loss, scored = _last_validation(state, scores, folder)
    base = _base(scores[-1], "valid_")
    _check_loss(loss, scores, base, folder)
    facts = settings_facts(state["cfg"]) | {
        "log base": base,
        "vocabulary": _vocabulary(log, folder),
        "updates": _updates(state),
        "trained tokens": curves.train[-1].tokens if curves.train else None,
        "tokens per update": _tokens(lines),
        "batches": batches(folder / DIAGNOSTICS),
        "place in the data": _place(state),
        "scored tokens": scored,
    }
    return Record(
        facts=facts,
        model=_find(r"(?: \| |:)model: (\w+)", log, folder),
        scheme=_scheme(log),
        parameters=int(_find(r"num\. trained: ([\d,]+)\)", log, folder).replace(",", "")),
        loss=loss * math.log(base or math.nan),
        scored=scored,
        peak_memory_bytes=_device_memory(log, lines),
    )


def done(folder: Path) -> int:
    """Return the updates in the checkpoint that a run goes on from."""
    path = folder / CHECKPOINT
    return _updates(_checkpoint(path)) if path.is_file() else 0


def mend(folder: Path) -> None:
    """Leave only whole checkpoints: fairseq copies the last one, which a kill cuts short."""
    for path in folder.glob("*.pt"):
        if not zipfile.is_zipfile(path):
            path.unlink()
    whole = sorted(folder.glob("checkpoint_*_*.pt"), key=lambda path: path.stat().st_mtime)
    if whole and not (folder / CHECKPOINT).exists():
        whole[-1].rename(folder / CHECKPOINT)


def tidy(folder: Path) -> None:
    """Delete all but the last checkpoint of a run that has finished."""
    for path in itertools.chain(folder.glob("*.pt"), folder.glob("*.pt.tmp")):
        if path.name != CHECKPOINT:
            path.unlink()


def _nats(line: Mapping[str, Any], prefix: str = "") -> float:
    return float(line[f"{prefix}loss"]) * math.log(_base(line, prefix) or 2.0)


def _base(line: Mapping[str, Any], prefix: str = "") -> float | None:
    """Return the base of the logarithm of a loss: 2 or e, told by its perplexity."""
    loss, perplexity = float(line[f"{prefix}loss"]), float(line[f"{prefix}ppl"])
    if not 0.05 < loss < 100 or not math.isfinite(perplexity):
        return None
    bases = [b for b in (2.0, math.e) if abs(b**loss - perplexity) <= 0.01 + 0.01 * perplexity]
    return bases[0] if len(bases) == 1 else None


def _tokens(lines: list[tuple[str, dict[str, Any]]]) -> list[list[float]]:
    """Return updates and tokens per update of every log interval, once."""
    found = {float(x["num_updates"]): float(x["wpb"]) for kind, x in lines if kind != "valid"}
    return [[update, tokens] for update, tokens in sorted(found.items())]


def _vocabulary(log: str, folder: Path) -> list[int]:
    sizes = re.findall(r"[Dd]ictionary: (\d+) types", log)
    if not sizes:
        raise _lacks("a dictionary", folder)
    return [int(size) for size in dict.fromkeys(sizes)]


def _value(config: Mapping[str, Any], section: str, key: str) -> Any:
    part = config.get(section)
    value = part.get(key) if isinstance(part, Mapping) else getattr(part, key, None)
    if isinstance(value, list | tuple):
        return list(value)
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _place(state: Mapping[str, Any]) -> list[int]:
    iterator = state["extra_state"]["train_iterator"]
    return [int(iterator["epoch"]), int(iterator["iterations_in_epoch"])]


def _scheme(log: str) -> str | None:
    match = re.search(r"norm scheme (\S+), architecture hash \w+", log)
    return match[1] if match else None


def _device_memory(log: str, lines: list[tuple[str, dict[str, Any]]]) -> int | None:
    """Return the GPU's memory less what was free at least, which fairseq logs in 0.1 GB."""
    total = re.search(r"total memory = ([\d.]+) GB", log)
    free = [float(line["gb_free"]) for _, line in lines if "gb_free" in line]
    return round((float(total[1]) - min(free)) * 2**30) if total and free else None


def _find(pattern: str, log: str, folder: Path) -> str:
    match = re.search(pattern, log)
    if match is None:
        raise _lacks(repr(pattern), folder)
    return match[1]


def _lacks(what: str, folder: Path) -> CompareError:
    return CompareError(
        f"{folder / LOG}: got a log without {what}; fairseq's trainer writes it. Run again with "
        "--force."
    )


def _updates(state: Mapping[str, Any]) -> int:
    return int(state["optimizer_history"][-1]["num_updates"])


def _last_validation(
    state: Mapping[str, Any], scores: list[dict[str, Any]], folder: Path
) -> tuple[float, int]:
    """Return the loss of the last validation, and its tokens.

    The trainer's meter sums up all validations: what it was at the checkpoint before is taken off.
    At the end of an epoch fairseq keeps no such checkpoint, and the loss is the log's.
    """
    summed, count = _meter(state, "valid", folder)
    others = [_checkpoint(path) for path in folder.glob("checkpoint_*_*.pt")]
    others = [other for other in others if _updates(other) < _updates(state)]
    before = max(others, key=_updates, default=None)
    old_sum, old_count = _meter(before, "valid", folder) if before else (0.0, 0)
    start = _updates(before) if before else 0
    between = {at for line in scores if (at := int(line["valid_num_updates"])) > start}
    if len(between) > 1:
        return float(scores[-1]["valid_loss"]), (count - old_count) // len(between)
    return (summed - old_sum) / (count - old_count), count - old_count


def _meter(state: Mapping[str, Any], name: str, folder: Path) -> tuple[float, int]:
    """Return the sum and the token count of the trainer's loss meter."""
    for _, key, _, meter in state["extra_state"]["metrics"].get(name, ()):
        if key == "loss" and meter["count"]:
            return float(meter["sum"]), int(meter["count"])
    raise CompareError(
        f"{folder / CHECKPOINT}: got no {name} loss; the trainer records one. "
        "Run again with --force, without options that switch it off."
    )


def _check_loss(
    loss: float, scores: list[dict[str, Any]], base: float | None, folder: Path
) -> None:
    said = float(scores[-1]["valid_loss"])
    if base is None or not abs(loss - said) <= 0.002:  # written so that NaN is refused
        raise CompareError(
            f"{folder}: got validation loss {loss:.4f} in the checkpoint and {said} in the log; "
            "legal is one finite loss to base 2 or e, with its perplexity. Lower --lr if it "
            "diverged."
        )


def _checkpoint(path: Path) -> dict[str, Any]:
    import torch

    if not path.is_file():
        raise CompareError(
            f"{path}: got no file; the trainer writes it at the end. Run again with --force."
        )
    # Written by our own child process a moment ago: it may hold more than tensors.
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
