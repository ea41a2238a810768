"""How Megatron trains an arm: the command line of its trainer, one process per rank."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from typing import Any

from normplugin.compare import megatron_record
from normplugin.compare.frameworks import DIAGNOSTICS, Dataset, by_option
from normplugin.compare.plan import Job, Settings
from normplugin.errors import CompareError, MissingFrameworkError

_ENTRY = "normplugin.megatron_plugin.pretrain_gpt"


def require(settings: Settings) -> None:
    """Raise `MissingFrameworkError` unless Megatron is there, `CompareError` without GPUs."""
    try:
        found = importlib.util.find_spec("megatron.training")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise MissingFrameworkError(
            "compare: got no megatron.training; its own trainer trains every arm, and "
            "megatron-core's wheels hold it from 0.17 on. Install normplugin[megatron]."
        )
    if settings.device == "cuda":
        gpus = importlib.import_module("torch").cuda.device_count()
        if gpus < settings.nproc:
            raise CompareError(
                f"--nproc: got {settings.nproc} with --device cuda; torch sees {gpus} GPUs. "
                "Take fewer, or --device cpu."
            )


def arguments(job: Job, settings: Settings, data: Dataset) -> list[str]:
    """Return the trainer's arguments but for the paths; an arm's own options come last and win."""
    dims, updates, interval = settings.dims(), str(settings.updates), str(settings.valid_interval)
    window, per_rank = str(settings.window), str(settings.batch // settings.data_parallel)
    scheme = job.arm.placement
    return [
        *("--num-layers", str(dims.n_layers), "--hidden-size", str(dims.d_model)),
        *("--ffn-hidden-size", str(dims.d_ffn), "--num-attention-heads", str(dims.n_heads)),
        *("--seq-length", window, "--max-position-embeddings", window),
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
        *("--micro-batch-size", per_rank, "--global-batch-size", str(settings.batch)),
        *("--optimizer", "adam", "--adam-beta1", "0.9", "--adam-beta2", "0.98"),
        *("--clip-grad", "1.0", "--weight-decay", "0.0"),
        *("--lr", f"{job.lr:g}", "--min-lr", "0.0", "--lr-decay-style", "linear"),
        *("--lr-warmup-iters", str(settings.warm_up)),
        *("--lr-decay-iters", str(settings.updates + settings.ramp)),
        *("--train-iters", updates, "--seed", str(job.seed)),
        *("--log-interval", str(settings.log_interval)),
        *("--eval-interval", interval, "--eval-iters", str(_eval_iterations(settings, data))),
        *("--save-interval", interval, "--save-retain-interval", updates),
        *("--tokenizer-type", "SentencePieceTokenizer", "--make-vocab-size-divisible-by", "128"),
        *_layout(settings),
        *(["--cpu-emulation"] if settings.device == "cpu" else []),
        *settings.extra,
        *(["--norm-scheme", scheme.name] if scheme else []),
        *job.arm.options,
    ]


def command(job: Job, settings: Settings, data: Dataset) -> list[str]:
    """Return the command line of a run; Megatron goes on from a checkpoint it finds."""
    records = (
        *("--diagnostics-interval", str(settings.diagnostics)),
        *("--diagnostics-file", str(job.folder / DIAGNOSTICS)),
    )
    processes = ("--nproc-per-node", str(settings.nproc))
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", *processes),
        *("-m", _ENTRY, *_places(job, data), *arguments(job, settings, data)),
        *(records if settings.diagnostics else ()),
    ]


def environment(settings: Settings) -> dict[str, str]:
    """Return what is added to a run's environment."""
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}


def facts(job: Job, settings: Settings, data: Dataset) -> dict[str, Any]:
    """Return what a run will be, as far as its command line says."""
    words = by_option(arguments(job, settings, data))
    options = {
        name.removeprefix("--").replace("-", "_"): " ".join(values) or "True"
        for name, values in words.items()
    }
    return {"data": data.digest, **megatron_record.settings_facts(options)}


def versions() -> dict[str, str]:
    """Return the versions that decide a result."""
    return {name: importlib.metadata.version(name) for name in ("megatron-core", "torch")}


def _eval_iterations(settings: Settings, data: Dataset) -> int:
    """As many batches as the validation text fills: about the whole of it, every time."""
    return max(1, (data.valid.tokens - 1) // (settings.window * settings.batch))


def _layout(settings: Settings) -> list[str]:
    # Not --sequence-parallel: Megatron's own model needs Transformer Engine or apex for it.
    return [
        *("--tensor-model-parallel-size", str(settings.tp)),
        *("--pipeline-model-parallel-size", str(settings.pp)),
    ]


def _places(job: Job, data: Dataset) -> list[str]:
    save = str(job.folder / megatron_record.CHECKPOINTS)
    # The index of the samples goes to the run's folder: the data may be read-only, and is hashed.
    return [
        *("--train-data-path", str(data.files / "train_text_document")),
        *("--valid-data-path", str(data.files / "valid_text_document")),
        *("--data-cache-path", str(job.folder / "cache")),
        *("--tokenizer-model", str(data.folder.resolve() / "spm.model")),
        *("--save", save, "--load", save),
    ]
