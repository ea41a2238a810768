"""The doctor's probes of fairseq and Megatron-Core: what differs between releases, by trying it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import pickle
import platform
import tempfile
from pathlib import Path

from normplugin.doctor_probes import BROKEN, MISSING, OK, Finding, attempt, origin

FAIRSEQ_RANGE = (
    "on Python 3.11 and 3.12, pip install torch fairseq-fixed==0.12.3.1; the official fairseq "
    "0.12.2 runs on Python up to 3.10 and installs with pip < 24.1"
)
MEGATRON_RANGE = (
    "on Python 3.12, pip install torch psutil 'megatron-core>=0.17,<0.20'; 0.16.1 is the last for "
    "Python 3.10 and 3.11, and 0.15.0 cannot be imported without CUDA"
)


def probe_fairseq() -> list[Finding]:
    """Import fairseq and try what differs between its releases, forks and commits."""
    python = platform.python_version()
    if importlib.util.find_spec("fairseq") is None:
        return [Finding("fairseq", MISSING, f"not installed (Python {python})", FAIRSEQ_RANGE)]
    found = attempt("fairseq", FAIRSEQ_RANGE, _import_fairseq)
    if found.status != OK:
        fact = f"cannot be imported on Python {python}: {found.fact}"
        return [dataclasses.replace(found, fact=fact)]
    return [
        found,
        attempt("fairseq duplicates", "report this to normplugin", _duplicate_model),
        attempt("fairseq scale flags", "report this to normplugin", _scale_flags),
        attempt("fairseq data", "install a fairseq that fits this numpy", _fairseq_dataset),
        attempt("fairseq --user-dir", "reinstall normplugin", _user_dir),
        attempt("fairseq checkpoints", "install torch and fairseq that fit", _checkpoints),
        attempt("fairseq generation", "install numpy<2", _eos_blocks),
    ]


def _import_fairseq() -> str:
    fairseq = importlib.import_module("fairseq")
    for name in ("checkpoint_utils", "models.transformer_lm", "tasks"):
        importlib.import_module(f"fairseq.{name}")
    return origin(fairseq)


def _duplicate_model() -> str:
    from fairseq.models import BaseFairseqModel, register_model

    name = "normplugin_doctor"
    first = register_model(name)(type("First", (BaseFairseqModel,), {}))
    try:
        second = register_model(name)(type("Second", (BaseFairseqModel,), {}))
    except ValueError:
        return "registering a model name twice raises"
    return f"registering a model name twice silently {_which(first is second)}"


def _which(kept: bool) -> str:
    return "keeps the first class" if kept else "takes the second class"


def _scale_flags() -> str:
    from fairseq.models.transformer import TransformerConfig
    from fairseq.models.transformer_lm import TransformerLanguageModelConfig
    from fairseq.modules.transformer_layer import TransformerDecoderLayer
    from omegaconf import OmegaConf

    fields = {field.name for field in dataclasses.fields(TransformerLanguageModelConfig)}
    if "scale_heads" not in fields:
        return "no --scale-* flags; use --norm-scheme"
    config = OmegaConf.create(
        {"scale_heads": True, "decoder": {"embed_dim": 8, "ffn_embed_dim": 8}}
    )
    layer = TransformerDecoderLayer(TransformerConfig.from_namespace(config))
    if getattr(layer, "c_attn", None) is None:
        return "--scale-* flags are accepted and do nothing; use --norm-scheme"
    return "--scale-* flags reach the layer; --norm-scheme does not need them"


def _fairseq_dataset() -> str:
    import torch
    from fairseq.data import indexed_dataset

    with tempfile.TemporaryDirectory() as folder:
        stem = str(Path(folder) / "tiny")
        builder = indexed_dataset.make_builder(stem + ".bin", impl="mmap", vocab_size=100)
        builder.add_item(torch.tensor([5, 6, 7]))
        builder.finalize(stem + ".idx")
        data = indexed_dataset.make_dataset(stem, impl="mmap")
        if data[0].tolist() != [5, 6, 7]:
            raise ValueError("an mmap dataset does not return what was written")
        del data
    return "an mmap dataset written and read back"


def _user_dir() -> str:
    from fairseq import utils
    from fairseq.models import ARCH_MODEL_REGISTRY

    folder = Path(__file__).resolve().parent / "fairseq_plugin"
    utils.import_user_module(argparse.Namespace(user_dir=str(folder)))
    missing = {"normformer", "periln"} - set(ARCH_MODEL_REGISTRY)
    if missing:
        raise LookupError(f"--user-dir {folder} did not register {', '.join(sorted(missing))}")
    return f"{folder} registers normformer and periln"


def _checkpoints() -> str:
    """Load what fairseq-train writes (plain values), then a file with a config object inside."""
    if not _loads({"plain": 1}):
        raise ValueError("fairseq cannot load what fairseq-train writes")
    if _loads(argparse.Namespace(arch="tiny")):
        return "fairseq loads files that hold config objects"
    return (
        "files of fairseq-train load; older ones that hold Python objects do not: for those you "
        "trust, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"
    )


def _loads(args: object) -> bool:
    import torch
    from fairseq import checkpoint_utils

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.pt"
        torch.save({"args": args, "model": {}}, path)
        try:
            checkpoint_utils.load_checkpoint_to_cpu(str(path))
        except pickle.UnpicklingError:
            return False
        except Exception:  # past the unpickler; the tiny file lacks what real ones hold
            return True
    return True


def _eos_blocks() -> str:
    """Cut a dataset into sentences, as interactive generation does."""
    from fairseq.data import TokenBlockDataset

    TokenBlockDataset([b"abc", b"abcd"], [3, 4], None, pad=1, eos=2, break_mode="eos")
    return "interactive generation can cut its input (fairseq's eos break mode)"


def probe_megatron() -> list[Finding]:
    """Import Megatron-Core, build its stock layer spec, then ours; then the training scripts."""
    if importlib.util.find_spec("megatron") is None:
        return [Finding("megatron.core", MISSING, "not installed", MEGATRON_RANGE)]
    found = attempt("megatron.core", MEGATRON_RANGE, _import_megatron)
    if found.status != OK:
        return [found]
    training = attempt("megatron.training", "", _import_training)
    if training.status != OK:
        action = (
            "needed only by the launcher and pretrain_gpt: use megatron-core 0.17 or later, or put "
            "a Megatron-LM checkout on PYTHONPATH"
        )
        status = MISSING if "ModuleNotFoundError" in training.fact else BROKEN
        training = dataclasses.replace(training, status=status, action=action)
    if importlib.util.find_spec("normplugin.megatron_plugin") is None:
        return [found, training]
    return [found, attempt("megatron --spec", "reinstall normplugin", _our_specs), training]


def _import_megatron() -> str:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    get_gpt_layer_local_spec()
    return origin(importlib.import_module("megatron.core"))


def _import_training() -> str:
    module = importlib.import_module("megatron.training")
    return f"imported from {Path(str(module.__file__)).parent}"


def _our_specs() -> str:
    specs = importlib.import_module("normplugin.megatron_plugin.specs")
    missing = {"normformer", "periln"} - set(vars(specs))  # --spec reads vars(module)[name]
    if missing:
        raise LookupError(f"normplugin.megatron_plugin.specs lacks {', '.join(sorted(missing))}")
    return "normplugin.megatron_plugin.specs holds normformer and periln"
