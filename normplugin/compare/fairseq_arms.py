"""How fairseq trains an arm: its command line, checked by fairseq's own parser before the start."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from normplugin.compare import fairseq_record
from normplugin.compare.frameworks import DIAGNOSTICS, ROOT, Dataset
from normplugin.compare.plan import KINDS, Job, Settings
from normplugin.errors import CompareError, MissingFrameworkError
from normplugin.placement import NAMED_SCHEMES, NormScheme

_TRAINER, _WATCHED = "fairseq_cli.train", "normplugin.diagnostics.fairseq_train"
# glibc returns every logits tensor to the system and faults it in again; kept, a tiny model on a
# CPU trains 1.6 times as fast (measured: 4,300 to 7,000 tokens/s, system time 6.0 to 1.5 s).
_ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
_NEVER = "1000000000"
# Kind -> upstream's own Pre-LN architecture, and the stacks whose sizes a model is given.
_UPSTREAM = {
    "lm": (("--arch", "transformer_lm_gpt"), ("decoder",)),
    "mlm": (("--arch", "roberta_prenorm"), ("encoder",)),
    "mt": (
        *(("--arch", "transformer", "--encoder-normalize-before", "--decoder-normalize-before"),),
        ("encoder", "decoder"),
    ),
}


def require(settings: Settings) -> None:
    """Raise `MissingFrameworkError` unless fairseq imports, `CompareError` without the device."""
    _imported("fairseq_cli.train")
    if settings.device == "cuda" and not importlib.import_module("torch").cuda.is_available():
        raise CompareError("--device: got cuda; torch sees no GPU. Take --device cpu.")


def arguments(job: Job, settings: Settings, data: Dataset) -> list[str]:
    """Return the trainer's arguments but for the paths; an arm's own options come last and win."""
    interval = str(settings.valid_interval)
    return [
        *_task(settings, data),
        *("--required-batch-size-multiple", "1"),  # with 8, fairseq drops pairs that are left over
        *("--dropout", "0", "--attention-dropout", "0"),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", "1.0"),
        *("--lr", f"{job.lr:g}", "--lr-scheduler", "polynomial_decay"),
        *("--warmup-updates", str(settings.warm_up)),
        # With a ramp the decay would begin where the run ends; its length may not be zero.
        *("--total-num-update", str(settings.updates + settings.ramp)),
        *("--max-update", str(settings.updates), "--seed", str(job.seed)),
        *("--num-workers", "0", "--distributed-world-size", "1"),
        *("--log-format", "json", "--log-interval", str(settings.log_interval)),
        *("--validate-interval", _NEVER, "--save-interval", _NEVER, "--no-epoch-checkpoints"),
        *("--validate-interval-updates", interval, "--save-interval-updates", interval),
        *("--keep-interval-updates", "2"),
        *(["--cpu"] if settings.device == "cpu" else []),
        *_arch(job, settings),
        *settings.extra,
        *job.arm.options,
    ]


def command(job: Job, settings: Settings, data: Dataset) -> list[str]:
    """Return the command line of a run; fairseq goes on from a checkpoint it finds."""
    records = (
        *("--diagnostics-interval", str(settings.diagnostics)),
        *("--diagnostics-file", str(job.folder / DIAGNOSTICS)),
    )
    return [
        *(sys.executable, "-m", _WATCHED if settings.diagnostics else _TRAINER),
        *_places(job, data),
        *arguments(job, settings, data),
        *(records if settings.diagnostics else ()),
    ]


def environment(settings: Settings) -> dict[str, str]:
    """Return what is added to a run's environment."""
    return {**_ALLOCATOR, "LOGLEVEL": "INFO"}


def facts(job: Job, settings: Settings, data: Dataset) -> dict[str, Any]:
    """Return what a run will be, by fairseq's own configuration of it.

    Raises:
        CompareError: fairseq's parser, or our plugin in it, refuses the arguments.
    """
    argv = [*_places(job, data), *arguments(job, settings, data)]
    return fairseq_record.settings_facts(_configuration(job, argv))


def versions() -> dict[str, str]:
    """Return the versions that decide a result."""
    return {
        "fairseq": str(_imported("fairseq.version").__version__),
        "torch": importlib.metadata.version("torch"),
    }


def _task(settings: Settings, data: Dataset) -> list[str]:
    window, batch = str(settings.window), str(settings.batch)
    if settings.kind == "mt":
        source, target = data.languages or ("", "")
        return [
            *("--task", "translation", "--criterion", "cross_entropy", "--share-all-embeddings"),
            *("--source-lang", source, "--target-lang", target),
            *("--max-tokens", str(settings.window * settings.batch)),
        ]
    task, criterion = {
        "lm": ("language_modeling", "cross_entropy"),
        "mlm": ("masked_lm", "masked_lm"),
    }[settings.kind]
    shared = ["--share-decoder-input-output-embed"] if settings.kind == "lm" else []
    return [
        *("--task", task, "--criterion", criterion, *shared),
        *("--sample-break-mode", "none", "--tokens-per-sample", window),
        *("--batch-size", batch),
    ]


def _arch(job: Job, settings: Settings) -> list[str]:
    upstream, stacks = _UPSTREAM[settings.kind]
    dims = settings.dims()
    sizes = {
        "layers": dims.n_layers,
        "embed-dim": dims.d_model,
        "ffn-embed-dim": dims.d_ffn,
        "attention-heads": dims.n_heads,
    }
    return [
        *(_scheme(job.arm.placement, settings.kind) if job.arm.placement else upstream),
        *(w for s in stacks for k, v in sizes.items() for w in (f"--{s}-{k}", f"{v}")),
    ]


def _scheme(placement: NormScheme, kind: str) -> list[str]:
    suffix = KINDS[kind][1]
    if placement.name in NAMED_SCHEMES:
        return ["--arch", placement.name + suffix]
    return ["--arch", "preln" + suffix, "--norm-scheme", placement.name]


def _places(job: Job, data: Dataset) -> list[str]:
    user_dir = [] if job.arm.upstream else ["--user-dir", str(ROOT / "fairseq_plugin")]
    return [str(data.files), "--save-dir", str(job.folder), *user_dir]


def _configuration(job: Job, argv: Sequence[str]) -> dict[str, Any]:
    options, convert = _imported("fairseq.options"), _imported("fairseq.dataclass.utils")
    said = io.StringIO()
    try:
        with _quiet(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parser = options.get_training_parser()
            parsed = options.parse_args_and_arch(parser, input_args=list(argv))
            config = convert.convert_namespace_to_omegaconf(parsed)
            return _imported("omegaconf").OmegaConf.to_container(config, resolve=True)
    except SystemExit as error:
        lines = (said.getvalue() + f"\n{error}").splitlines()
        told = [line.strip() for line in lines if "error: " in line]
        why = told[-1].partition("error: ")[2] if told else str(error)
        raise CompareError(
            f"arm {job.arm.name!r}: got {' '.join(job.arm.options) or 'no options'}; fairseq "
            f"refuses it: {why.rstrip('.')}. Change the arm, or the arguments after --."
        ) from None


def _imported(module: str) -> ModuleType:
    """Import without the warnings that fairseq prints about its own extras."""
    try:
        with _quiet():
            return importlib.import_module(module)
    except Exception as error:  # fairseq 0.12.2 raises ValueError on Python 3.11 and later
        raise MissingFrameworkError(
            f"compare: got no working fairseq (importing {module}: {error}); its own trainer "
            "trains every arm. Install normplugin[fairseq]."
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
