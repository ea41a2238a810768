"""What a finished fairseq run says about itself: its log and its checkpoint.

The log has the model, the vocabulary, the parameters and the speed of every log interval; the
checkpoint has the configuration that was in force, the updates done, and the meters of the trainer
(losses in bits, summed, with the exact number of target tokens, each document's eos included).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normplugin.errors import CompareError

LOG = "train.log"
CHECKPOINT = "checkpoint_last.pt"
_STATS = re.compile(r" \| (train_inner|valid) \| (\{.*\})\s*$", re.MULTILINE)
_DATA_FILES = ("dict.txt", "train.bin", "train.idx", "valid.bin", "valid.idx")
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
    "fp16": ("common", "fp16"),
    "bf16": ("common", "bf16"),
    "on the CPU": ("common", "cpu"),
}
_HYPERPARAMETERS = {
    "learning rate": ("optimization", "lr"),
    "schedule": ("lr_scheduler", "_name"),
    "warm-up updates": ("lr_scheduler", "warmup_updates"),
    "optimizer": ("optimizer", "_name"),
    "betas": ("optimizer", "adam_betas"),
    "weight decay": ("optimizer", "weight_decay"),
    "gradient clip": ("optimization", "clip_norm"),
    "dropout": ("model", "dropout"),
    "layers": ("model", "decoder_layers"),
    "d_model": ("model", "decoder_embed_dim"),
    "d_ffn": ("model", "decoder_ffn_embed_dim"),
    "n_heads": ("model", "decoder_attention_heads"),
}


@dataclass(frozen=True)
class Record:
    """One finished run.

    Attributes:
        facts: What must be equal before two runs may be ranked.
        hyperparameters: What is shown side by side.
        model: Class of the model.
        scheme: Norm scheme and architecture hash, where the model is ours.
        parameters: Number of trained parameters.
        valid_bits: Summed validation loss, base 2.
        intervals: Per log interval: updates done, tokens per update, tokens per second, loss.
    """

    facts: dict[str, Any]
    hyperparameters: dict[str, Any]
    model: str
    scheme: dict[str, str] | None
    parameters: int
    valid_bits: float
    intervals: list[dict[str, float]]


def settings_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that a configuration decides, before or after a run."""
    facts = {name: _value(config, *place) for name, place in _SETTINGS.items()}
    return {"data": _data_hash(Path(config["task"]["data"])), **facts}


def read(folder: Path) -> Record:
    """Return the record of a finished run; raise `CompareError` where it does not hold one."""
    log = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    state = _checkpoint(folder / CHECKPOINT)
    config = state["cfg"]
    stats = _stats(log)
    valid_bits, scored = _meter(state, "valid", folder)
    _check_loss(valid_bits / scored, stats["valid"][-1:], folder)
    facts = settings_facts(config) | {
        "vocabulary": int(_find(r"dictionary: (\d+) types", log, folder)),
        "updates": int(state["optimizer_history"][-1]["num_updates"]),
        "trained tokens": _meter(state, "default", folder)[1],
        "tokens per update": [_pick(line, "num_updates", "wpb") for line in stats["train_inner"]],
        "place in the data": _place(state),
        "scored tokens": scored,
    }
    return Record(
        facts=facts,
        hyperparameters={name: _value(config, *at) for name, at in _HYPERPARAMETERS.items()},
        model=_find(r" model: (\w+)", log, folder),
        scheme=_scheme(log),
        parameters=int(_find(r"num\. trained: ([\d,]+)\)", log, folder).replace(",", "")),
        valid_bits=valid_bits,
        intervals=[_interval(line) for line in stats["train_inner"]],
    )


def progress(text: str) -> dict[str, float] | None:
    """Return the newest log interval in a piece of log."""
    lines = _stats(text)["train_inner"]
    return _interval(lines[-1]) if lines else None


def _stats(log: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {"train_inner": [], "valid": []}
    for match in _STATS.finditer(log):
        found[match[1]].append(json.loads(match[2]))
    return found


def _interval(line: Mapping[str, Any]) -> dict[str, float]:
    names = {"updates": "num_updates", "tokens_per_update": "wpb", "tokens_per_second": "wps"}
    interval = {name: float(line[key]) for name, key in names.items() if key in line}
    return {**interval, "loss_bits": float(line["loss"])}


def _pick(line: Mapping[str, Any], *keys: str) -> list[float]:
    return [float(line[key]) for key in keys]


def _value(config: Mapping[str, Any], section: str, key: str) -> Any:
    part = config.get(section)
    value = part.get(key) if isinstance(part, Mapping) else getattr(part, key, None)
    return list(value) if isinstance(value, list | tuple) else value


def _place(state: Mapping[str, Any]) -> list[int]:
    iterator = state["extra_state"]["train_iterator"]
    return [int(iterator["epoch"]), int(iterator["iterations_in_epoch"])]


def _scheme(log: str) -> dict[str, str] | None:
    match = re.search(r"norm scheme (\S+), architecture hash (\w+)", log)
    return {"name": match[1], "architecture_hash": match[2]} if match else None


def _find(pattern: str, log: str, folder: Path) -> str:
    match = re.search(pattern, log)
    if match is None:
        raise CompareError(
            f"{folder / LOG}: got a log without {pattern!r}; fairseq's trainer writes it. "
            "Run again with --force."
        )
    return match[1]


def _meter(state: Mapping[str, Any], name: str, folder: Path) -> tuple[float, int]:
    """Return the sum and the token count of the trainer's loss meter."""
    for _, key, _, meter in state["extra_state"]["metrics"].get(name, ()):
        if key == "loss" and meter["count"]:
            return float(meter["sum"]), int(meter["count"])
    raise CompareError(
        f"{folder / CHECKPOINT}: got no {name} loss; the trainer records one. "
        "Run again with --force, without options that switch it off."
    )


def _check_loss(bits: float, logged: list[dict[str, Any]], folder: Path) -> None:
    said = float(logged[0]["valid_loss"]) if logged else math.nan
    if not abs(bits - said) <= 0.002:  # written so that NaN is refused
        raise CompareError(
            f"{folder}: got validation loss {bits:.4f} in the checkpoint and {said} in the log; "
            "legal is one finite loss, of one validation at the end. Lower --lr if it diverged."
        )


def _checkpoint(path: Path) -> dict[str, Any]:
    import torch

    if not path.is_file():
        raise CompareError(
            f"{path}: got no file; the trainer writes it at the end. Run again with --force."
        )
    # Written by our own child process a moment ago: it may hold more than tensors.
    return torch.load(path, map_location="cpu", weights_only=False)


def _data_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in _DATA_FILES:
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise CompareError(
                f"data: got {folder}; reading {name} failed ({error.strerror}). Prepare it for "
                "fairseq: 'normplugin prepare --frameworks fairseq'."
            ) from None
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()
