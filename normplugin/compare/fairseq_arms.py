"""How fairseq trains an arm: its command line, checked by fairseq's own parser before the start."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.metadata
import io
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import normplugin
from normplugin.compare.plan import Arm, Settings, split_arms
from normplugin.errors import CompareError, MissingFrameworkError
from normplugin.placement import NAMED_SCHEMES
from normplugin.presets import ARCHITECTURES, CAUSAL_SIZES

_ROOT = Path(normplugin.__file__).resolve().parent
USER_DIR = _ROOT / "fairseq_plugin"
TOKENS_PER_SAMPLE = 128
BATCH_SIZE = 16
# Our model is built from these; an edit of one makes an earlier result of ours another result.
_SOURCES = ("gains", "kernels", "norms", "placement", "presets", "fairseq_plugin/*")
# A launcher around us must not make fairseq think that it launched the trainer too.
_LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
# glibc returns every logits tensor to the system and faults it in again; kept, a tiny model on a
# CPU trains 1.6 times as fast (measured: 4,300 to 7,000 tokens/s, system time 6.0 to 1.5 s).
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
_NEVER = "1000000000"


def require(device: str) -> None:
    """Raise `MissingFrameworkError` unless fairseq imports, `CompareError` without the device."""
    _imported("fairseq_cli.train")
    if device == "cuda" and not importlib.import_module("torch").cuda.is_available():
        raise CompareError("--device: got cuda; torch sees no GPU. Take --device cpu.")


def arms(names: Sequence[str], baseline: str) -> list[Arm]:
    """Return the arms, the baseline first; raise `CompareError` for an unknown architecture."""
    upstream = _upstream()
    ours = [name for name, arch in ARCHITECTURES.items() if arch.kind == "causal_lm"]
    found = []
    for name, arch, options in split_arms(names, baseline):
        if arch in ours:
            found.append(Arm(name, arch, options, False, "NormLanguageModel"))
        elif arch in upstream:
            found.append(Arm(name, arch, options, True, upstream[arch]))
        else:
            raise CompareError(_unknown(arch, [*ours, *upstream]))
    return found


def _unknown(arch: str, legal: Sequence[str]) -> str:
    near = difflib.get_close_matches(arch, legal, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"--arms: got {arch!r}; legal are {', '.join(NAMED_SCHEMES)}, each also with "
        f"{', '.join(filter(None, CAUSAL_SIZES))}, and fairseq's transformer_lm*.{hint}"
    )


def _upstream() -> dict[str, str]:
    """Return fairseq's own decoder-only transformer architectures and their model classes."""
    models = _imported("fairseq.models")
    base = _imported("fairseq.models.transformer_lm").TransformerLanguageModel
    return {
        arch: cls.__name__
        for arch, cls in models.ARCH_MODEL_REGISTRY.items()
        if issubclass(cls, base) and cls.__module__.startswith("fairseq.")
    }


def shape(plan: Sequence[Arm]) -> list[str]:
    """Return the size that upstream's arms get: the size of the first arm of ours."""
    ours = [arm.arch for arm in plan if not arm.upstream]
    dims = ARCHITECTURES[ours[0]].dims if ours else CAUSAL_SIZES["_tiny"]
    return [
        *("--decoder-layers", str(dims.n_layers), "--decoder-embed-dim", str(dims.d_model)),
        *("--decoder-ffn-embed-dim", str(dims.d_ffn)),
        *("--decoder-attention-heads", str(dims.n_heads)),
    ]


def arguments(arm: Arm, plan: Sequence[Arm], settings: Settings) -> list[str]:
    """Return the trainer's arguments but for the paths; an arm's own options come last and win."""
    return [
        *("--task", "language_modeling", "--criterion", "cross_entropy"),
        *("--sample-break-mode", "none", "--tokens-per-sample", str(TOKENS_PER_SAMPLE)),
        *("--batch-size", str(BATCH_SIZE), "--required-batch-size-multiple", "1"),
        *("--share-decoder-input-output-embed", "--dropout", "0", "--attention-dropout", "0"),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", "1.0"),
        *("--lr", str(settings.lr), "--lr-scheduler", "polynomial_decay"),
        *("--warmup-updates", str(max(1, settings.updates // 10))),
        *("--total-num-update", str(settings.updates), "--max-update", str(settings.updates)),
        *("--seed", str(settings.seed), "--num-workers", "0", "--distributed-world-size", "1"),
        *("--log-format", "json", "--log-interval", str(max(1, min(10, settings.updates // 20)))),
        *("--validate-interval", _NEVER, "--save-interval", _NEVER, "--no-epoch-checkpoints"),
        *(["--cpu"] if settings.device == "cpu" else []),
        *("--arch", arm.arch, *(shape(plan) if arm.upstream else ())),
        *arm.options,
    ]


def paths(arm: Arm, data: Path, save_dir: Path) -> list[str]:
    """Return the arguments that name places; they are no part of what identifies a run."""
    user_dir = [] if arm.upstream else ["--user-dir", str(USER_DIR)]
    return [str(data.resolve() / "fairseq"), "--save-dir", str(save_dir.resolve()), *user_dir]


def command(arm: Arm, plan: Sequence[Arm], settings: Settings, data: Path, to: Path) -> list[str]:
    """Return the command line of an arm's process."""
    trainer = [sys.executable, "-m", "fairseq_cli.train"]
    return [*trainer, *paths(arm, data, to), *arguments(arm, plan, settings)]


def environment(settings: Settings) -> dict[str, str]:
    """Return the environment of an arm's process."""
    kept = {key: value for key, value in os.environ.items() if key not in _LAUNCHER}
    threads = str(settings.threads)
    kept.update(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads, OPENBLAS_NUM_THREADS=threads)
    kept.update(ALLOCATOR, PYTHONUNBUFFERED="1", LOGLEVEL="INFO")
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT.parent), kept.get("PYTHONPATH")]))
    if settings.device == "cpu":
        kept["CUDA_VISIBLE_DEVICES"] = ""
    return kept


def configuration(arm: Arm, argv: Sequence[str]) -> dict[str, Any]:
    """Return fairseq's configuration of an arm, as its trainer will see it.

    Raises:
        CompareError: fairseq's parser, or our plugin in it, refuses the arguments.
    """
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
            f"arm {arm.name!r}: got {' '.join(arm.options) or 'no options'}; fairseq refuses it: "
            f"{why.rstrip('.')}. Change the arm."
        ) from None


def versions() -> dict[str, str]:
    """Return the versions that decide a result."""
    return {
        "normplugin": normplugin.__version__,
        "fairseq": str(_imported("fairseq.version").__version__),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }


def source_hash() -> str:
    """Return a SHA-256 over the sources that our models are made of."""
    digest = hashlib.sha256()
    for path in sorted(path for name in _SOURCES for path in _ROOT.glob(f"{name}.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def identity(arm: Arm, plan: Sequence[Arm], settings: Settings, data: str) -> Mapping[str, object]:
    """Return what decides an arm's result; equal identities share one result."""
    return {
        **_by_option(arguments(arm, plan, settings)),
        "threads": settings.threads,
        "environment": ALLOCATOR,
        "data": data,
        "versions": versions(),
        "plugin source": None if arm.upstream else source_hash(),
    }


def _by_option(argv: Sequence[str]) -> dict[str, list[str]]:
    """Return every option with its values; the last mention of an option wins, as in argparse."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            values = found[name] = [value] if equals else []
        else:
            values.append(word)
    return found


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
