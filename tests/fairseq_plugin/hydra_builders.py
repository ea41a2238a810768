"""What ``fairseq-hydra-train`` does before it trains, in this process."""

from __future__ import annotations

from pathlib import Path

import fairseq_cli.hydra_train
import hydra
import torch
from fairseq import models
from fairseq.data import Dictionary
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.models import MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from normplugin.fairseq_plugin.archs import MODELS
from normplugin.fairseq_plugin.checks import TASKS
from normplugin.fairseq_plugin.stacks import placing_of

if not hasattr(hydra, "compose"):  # hydra 1.0, with the official fairseq
    import hydra.experimental as hydra


def hydra_config(monkeypatch, *overrides: str, folder: Path, name: str):
    """The config that reaches fairseq's trainer, which has imported the user dir by then."""
    seen: list = []
    GlobalHydra.instance().clear()
    hydra_init(name)
    with hydra.initialize_config_dir(config_dir=str(folder)):
        cfg = hydra.compose(name, overrides=list(overrides))
    monkeypatch.setattr(fairseq_cli.hydra_train, "pre_main", seen.append)
    fairseq_cli.hydra_train._hydra_main(cfg)
    add_defaults(seen[0])
    return seen[0]


def task_of(cfg):
    """The task of a config, with a dictionary of numbers."""
    dictionary = Dictionary()
    for i in range(60):
        dictionary.add_symbol(str(i))
    name = cfg.task._name
    return TASK_REGISTRY[name](cfg.task, *[dictionary] * (1 if name == "masked_lm" else 2))


def built(cfg):
    """The model of a config, from seed 0."""
    task = task_of(cfg)
    torch.manual_seed(0)
    return task.build_model(cfg.model)


def completed(monkeypatch, cfg) -> dict:
    """What the model class makes of a config, without what upstream's functions leave behind."""
    kind = next(kind for kind, names in TASKS.items() if cfg.task._name in names)

    def stop(cls, args, task):
        placing_of(args, task, kind)
        plain = OmegaConf.to_container(args, resolve=True, enum_to_str=True)
        return {k: v for k, v in plain.items() if k not in ("_name", "arch", "base_shuffle")}

    monkeypatch.setattr(MODEL_REGISTRY[MODELS[kind][0]], "build_model", classmethod(stop))
    return models.build_model(cfg.model, task_of(cfg))
