"""The doctor's probes: each tries one package by using it, and runs in a process of its own.

A probe returns findings and judges by behaviour; version numbers are printed, never compared.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

OK, MISSING, BROKEN = "OK", "MISSING", "BROKEN"
MARK = "normplugin-doctor: "  # frameworks print to stdout as well; this line is ours

APEX_ADVICE = (
    "uninstall it, or build NVIDIA's apex from source with its CUDA extensions; fairseq and "
    "Megatron-Core take it as soon as it imports, normplugin only after it has run"
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    status: str
    fact: str
    action: str = ""


def main(target: str) -> None:
    """Run the probe named 'module:function' and print its findings as one marked line."""
    module, _, function = target.partition(":")
    findings = getattr(importlib.import_module(module), function)()
    print("\n" + MARK + json.dumps([dataclasses.asdict(finding) for finding in findings]))
    sys.stdout.flush()


def brief(error: BaseException) -> str:
    """Return an exception as a short single line."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text[:200]}".rstrip(".: ")


def origin(module: Any) -> str:
    """Return where a package was imported from, and which distributions claim its name."""
    folder = str(Path(module.__file__).parent) if module.__file__ else "a folder without __init__"
    top = module.__name__.partition(".")[0]
    names = sorted(set(importlib.metadata.packages_distributions().get(top, [])))
    known = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return f"{' and '.join(known) or 'no installed distribution'}, imported from {folder}"


def attempt(name: str, action: str, task: Callable[[], str]) -> Finding:
    """Return OK with what the task says, or BROKEN with why it failed."""
    try:
        return Finding(name, OK, task())
    except Exception as error:  # whatever a half-installed package raises is the finding
        return Finding(name, BROKEN, brief(error), action)


def probe_torch() -> list[Finding]:
    """Multiply two small matrices in fp32 and bf16, on the GPU too where there is one."""
    if importlib.util.find_spec("torch") is None:
        return [Finding("torch", MISSING, "not installed", "pip install torch")]
    return [
        attempt("torch", "reinstall torch", lambda: _torch_fact("float32")),
        attempt("torch bf16", "train with fp32 or fp16", lambda: _torch_fact("bfloat16")),
    ]


def _torch_fact(dtype_name: str) -> str:
    import torch

    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    for device in devices:
        ones = torch.ones(8, 8, dtype=getattr(torch, dtype_name), device=device)
        if not bool((ones @ ones == 8).all()):
            raise ArithmeticError(f"a product of ones is wrong in {dtype_name} on {device}")
    if dtype_name != "float32":
        return f"matrix product right on {', '.join(devices)}"
    gpus = f"{torch.cuda.device_count()} GPU(s)" if len(devices) > 1 else "no GPU"
    return f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}, {gpus}"


def probe_transformer_engine() -> list[Finding]:
    """Import Transformer Engine's torch part; its norms run on a GPU only."""
    name = "transformer_engine"
    if importlib.util.find_spec(name) is None:
        action = "optional: needed only for --transformer-impl transformer_engine on a GPU"
        return [Finding(name, MISSING, "not installed", action)]
    action = "uninstall it, or build its torch part for this torch and CUDA"
    return [attempt(name, action, _run_transformer_engine)]


def _run_transformer_engine() -> str:
    import torch

    engine = importlib.import_module("transformer_engine.pytorch")
    if not torch.cuda.is_available():
        return f"{origin(engine)}; not run, for lack of a GPU"
    engine.LayerNorm(8)(torch.ones(2, 8, device="cuda"))
    return f"{origin(engine)}; a LayerNorm ran on the GPU"


def probe_apex() -> list[Finding]:
    """Construct and run one fused norm: apex imports well without its compiled parts."""
    if importlib.util.find_spec("apex") is None:
        return [Finding("apex", MISSING, "not installed", "optional: normplugin has its own norms")]
    try:
        unrelated = importlib.util.find_spec("apex.normalization") is None
    except Exception:  # importing the parent failed; running it below says how
        unrelated = False
    if unrelated:
        fact = "an unrelated package of that name (the index's apex is not NVIDIA's)"
        return [Finding("apex", BROKEN, fact, "pip uninstall apex")]
    return [attempt("apex", APEX_ADVICE, _run_apex)]


def _run_apex() -> str:
    import torch
    from apex.normalization import FusedLayerNorm

    device = "cuda" if torch.cuda.is_available() else "cpu"
    y = FusedLayerNorm(8).to(device)(torch.arange(16.0, device=device).view(2, 8))
    if not torch.allclose(y.mean(-1), torch.zeros(2, device=device), atol=1e-5):
        raise ArithmeticError("FusedLayerNorm's output has a mean other than 0")
    return f"{origin(importlib.import_module('apex'))}; a FusedLayerNorm ran on {device}"


def probe_sentencepiece() -> list[Finding]:
    """Train a tiny model in memory; encode and decode with it."""
    if importlib.util.find_spec("sentencepiece") is None:
        action = "pip install sentencepiece (needed by normplugin prepare)"
        return [Finding("sentencepiece", MISSING, "not installed", action)]
    return [attempt("sentencepiece", "reinstall sentencepiece", _round_trip)]


def _round_trip() -> str:
    import sentencepiece

    text = "a norm before, a norm after"
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text, text[::-1]]),
        model_writer=model,
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    if processor.decode(processor.encode(text)) != text:
        raise ValueError("decoding does not return the encoded text")
    return f"{sentencepiece.__version__}, round trip right"
