"""The papers' recipes: the tiny size trains here, the others are commands Megatron accepts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_trainer import REPO, environment, execute, validation_losses

from normplugin.presets import CAUSAL_SIZES

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip("megatron-core before 0.17 has no trainer", allow_module_level=True)
SIZES = {"normformer": ["125m", "355m", "1_3b", "2_7b"], "perioln": ["400m", "1_5b", "3_2b"]}

# Runs as $PYTHON: prints the training command instead of starting it.
SHOW = """#!{python}
import json, subprocess, sys
if "torch.distributed.run" in sys.argv:
    print(json.dumps(sys.argv[sys.argv.index("torch.distributed.run") + 1:]))
else:
    sys.exit(subprocess.call(["{python}", *sys.argv[1:]]))
"""

# Parses and checks commands as Megatron does on 8 GPUs, and prints what it understood.
PARSE = """
import json, os, sys
from normplugin.megatron_plugin import arguments, cpu_emulation
os.environ.update(RANK="0", WORLD_SIZE="8")
cpu_emulation.enable()
from megatron.training.arguments import parse_args, validate_args
found = []
for words in json.load(sys.stdin):
    ours, rest = arguments.split_options(words)
    sys.argv = ["pretrain_gpt", *words, *arguments.megatron_flags(ours, rest)]
    args = parse_args(arguments.add_norm_arguments)
    validate_args(args)
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
    found.append([[getattr(args, name) for name in names], arguments.scheme_from_args(args).name])
json.dump(found, sys.__stdout__)
"""


def script(folder: str) -> Path:
    """The script of an example."""
    return REPO / "examples" / folder / "train_megatron.sh"


@pytest.mark.parametrize("folder", SIZES)
def test_the_tiny_recipe_trains_on_the_cpu(folder, megatron_data, tmp_path):
    """One word, ``tiny``, and the recipe runs on two processes; it learns."""
    short = "--train-iters 10 --lr-warmup-iters 2 --eval-interval 5".split()
    log = execute(["bash", str(script(folder)), "tiny", str(megatron_data), *short], tmp_path)
    before, after, *_ = validation_losses(log)
    assert after < before


def test_megatron_accepts_the_papers_sizes(megatron_data, tmp_path):
    """Every size is a command that Megatron's own checks pass on one node of 8 GPUs."""
    show = tmp_path / "python"
    show.write_text(SHOW.format(python=sys.executable))
    show.chmod(0o755)
    cases = [(folder, size) for folder, sizes in SIZES.items() for size in sizes]
    commands = []
    for folder, size in cases:
        done = subprocess.run(
            ["bash", str(script(folder)), size, str(megatron_data)],
            env={**environment(), "PYTHON": str(show)},
            capture_output=True,
            text=True,
            check=True,
        )
        words = json.loads(done.stdout)
        commands.append(words[words.index("normplugin.megatron_plugin.pretrain_gpt") + 1 :])
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        env=environment(),
        input=json.dumps(commands),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for (folder, size), (shape, scheme) in zip(cases, found, strict=True):
        dims = CAUSAL_SIZES[f"_{size}"]
        assert shape == [dims.n_layers, dims.d_model, dims.d_ffn, dims.n_heads]
        assert scheme == {"normformer": "normformer", "perioln": "periln"}[folder]


@pytest.mark.parametrize(
    ("size", "settings", "message"),
    [
        ("40m", {}, "SIZE: got '40m'; legal are tiny,"),
        ("tiny", {"TP": "3"}, "TP, PP: got 3, 1 for 1 x 2 GPUs"),
    ],
)
def test_bad_input_is_one_sentence(size, settings, message, megatron_data, tmp_path):
    """An unknown size, or a layout that does not fit the GPUs: one line, exit code 2."""
    for folder in SIZES:
        done = subprocess.run(
            ["bash", str(script(folder)), size, str(megatron_data)],
            env={**environment(), **settings},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert done.stderr.startswith(f"train_megatron.sh: {message}")
        assert done.stderr.count("\n") == 1
