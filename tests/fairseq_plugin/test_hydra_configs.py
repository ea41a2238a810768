"""The shipped hydra configs are the recipes of examples/, key by key."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import REPO, USER_DIR
from fairseq import options
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from hydra_builders import completed, hydra_config
from omegaconf import OmegaConf

CONFIGS = USER_DIR / "config"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
SECTIONS = (
    *("common", "distributed_training", "task", "model", "criterion", "optimizer", "lr_scheduler"),
    *("optimization", "dataset", "checkpoint"),
)


def load(name: str, monkeypatch, folder: Path = CONFIGS):
    given = ["task.data=data", f"common.user_dir={USER_DIR}"]
    return hydra_config(monkeypatch, *given, folder=folder, name=name)


def recipe(name: str, folder: Path) -> list[str]:
    """The command line of the script that a config stands for."""
    scheme, _, size = name.partition("_")
    script = "train_fairseq"
    for kind in ("mlm", "mt"):
        if size.startswith(kind):
            script, size = f"train_fairseq_{kind}", size.partition("_")[2] or "base"
    data = folder / "data"
    data.mkdir()
    (data / "dict.txt").touch()
    (data / "dict.x.txt").touch()
    printer = folder / "python"
    printer.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    printer.chmod(0o755)
    example = REPO / "examples" / {"periln": "perioln"}.get(scheme, scheme)
    done = subprocess.run(
        [example / f"{script}.sh", size, data],
        env={**os.environ, "PYTHON": str(printer)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    module, *words = done.stdout.splitlines()[1:]
    assert module == "fairseq_cli.train"
    return words


def contents(monkeypatch, cfg) -> dict:
    """All that training reads, the architecture's part of it filled in."""
    model = completed(monkeypatch, cfg)
    plain = {**OmegaConf.to_container(cfg, resolve=True, enum_to_str=True), "model": model}
    del plain["common"]["user_dir"], plain["task"]["data"]
    del plain["distributed_training"]["distributed_num_procs"]  # 0.12.2 counts the GPUs here
    return {section: plain[section] for section in SECTIONS}


@pytest.mark.parametrize("name", NAMES)
def test_a_config_is_its_recipe(name, monkeypatch, tmp_path):
    """Every value that reaches the trainer equals that of the script, so no key is misspelt."""
    words = recipe(name, tmp_path)
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    line = convert_namespace_to_omegaconf(args)
    add_defaults(line)
    found, expected = (contents(monkeypatch, c) for c in (load(name, monkeypatch), line))
    for section in SECTIONS:
        assert found[section] == expected[section], section


def test_the_recipes_all_have_one():
    """Each size of each script, and a tiny one of each kind."""
    assert len(NAMES) == 17 and sum(name.endswith("tiny") for name in NAMES) == 6


@pytest.mark.parametrize("key", ["dropout", "weight_decay", "batch_size", "warmup_init_lr"])
def test_a_misspelt_key_is_refused(key, monkeypatch, tmp_path):
    """Before training, with the key's name."""
    text = (CONFIGS / "periln_tiny.yaml").read_text()
    (tmp_path / "periln_tiny.yaml").write_text(text.replace(f" {key}:", f" {key}_:"))
    with pytest.raises(Exception) as refused:  # hydra's and omegaconf's classes differ by release
        load("periln_tiny", monkeypatch, folder=tmp_path)
    assert f"{key}_" in f"{refused.value} {refused.value.__cause__}"


@pytest.mark.parametrize("name", NAMES)
def test_a_config_says_how_it_is_run(name):
    """The head of a file gives its own command."""
    text = (CONFIGS / f"{name}.yaml").read_text()
    assert f"--config-name {name} " in text and 'common.user_dir="$(normplugin user-dir)"' in text
