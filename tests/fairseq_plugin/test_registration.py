"""Every way into the plugin gives one registration; clashes stop."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, USER_DIR, environment
from fairseq.models.transformer_lm import TransformerLanguageModelConfig

from normplugin.fairseq_plugin.models import NormLanguageModel, NormLanguageModelConfig

COUNT = """
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from normplugin.fairseq_plugin.archs import MODELS
from normplugin.presets import ARCHITECTURES
for arch in ARCHITECTURES.values():
    name, module = MODELS[arch.kind]
    assert ARCH_MODEL_REGISTRY[arch.name] is MODEL_REGISTRY[name] in vars(module).values()
import sys
copies = [m for m in sys.modules if m.endswith("fairseq_plugin.archs")]
assert copies == ["normplugin.fairseq_plugin.archs"], copies
assert not any("fairseq.model_parallel.megatron" in m for m in sys.modules)
print("ONE")
"""
BY_PATH = """
from argparse import Namespace
from fairseq.utils import import_user_module
import_user_module(Namespace(user_dir={!r}))
"""
EXAMPLES = [str(REPO / "examples" / name) for name in ("normformer", "perioln")]


def run(code: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(["import normplugin.fairseq_plugin"], id="import"),
        pytest.param([BY_PATH.format(str(USER_DIR))], id="path"),
        pytest.param(
            ["import normplugin.fairseq_plugin", BY_PATH.format(str(USER_DIR))], id="both"
        ),
        pytest.param(
            [BY_PATH.format(str(USER_DIR)), "import normplugin.fairseq_plugin"], id="htob"
        ),
        pytest.param([BY_PATH.format(str(USER_DIR) + "/")] * 2, id="twice, trailing slash"),
        pytest.param([BY_PATH.format(path) for path in [*EXAMPLES, str(USER_DIR)]], id="examples"),
    ],
)
def test_any_order_gives_one_registration(steps, tmp_path):
    """By import, by path, in both orders, twice and through the examples: registered once."""
    done = run("\n".join([*steps, COUNT]), tmp_path)
    assert done.stdout.endswith("ONE\n"), done.stderr[-2000:]


def test_through_a_link(tmp_path):
    """A link to the folder registers once, also after the plugin was imported."""
    link = tmp_path / "somewhere" / "fairseq_plugin"
    link.parent.mkdir()
    link.symlink_to(USER_DIR)
    for first in ("", "import normplugin.fairseq_plugin\n"):
        done = run(first + BY_PATH.format(str(link)) + COUNT, tmp_path)
        assert done.stdout.endswith("ONE\n"), done.stderr[-2000:]


def test_spawned_workers_build_the_same_model(tmp_path):
    """A spawned process that gets only the config imports the user dir and builds the model."""
    script = tmp_path / "spawn.py"
    script.write_text(
        f"""
import pickle
import torch.multiprocessing as mp
from fairseq import options, tasks
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.utils import import_user_module

def names(cfg):
    import_user_module(cfg.common)
    task = LanguageModelingTask(cfg.task, Dictionary(), Dictionary())
    return [n for n, _ in task.build_model(cfg.model).named_parameters()]

def child(rank, pickled, queue):
    queue.put(names(pickle.loads(pickled)))

if __name__ == "__main__":
    argv = ["data", "--user-dir", {str(USER_DIR)!r}, "--task", "language_modeling",
            "--arch", "normformer_tiny"]
    args = options.parse_args_and_arch(options.get_training_parser(), argv)
    cfg = convert_namespace_to_omegaconf(args)
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(child, (pickle.dumps(cfg), queue), nprocs=2)
    expected = names(cfg)
    assert queue.get() == queue.get() == expected and len(expected) > 60
    print("SAME")
"""
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.stdout.endswith("SAME\n"), done.stderr[-2000:]


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (
            "@register_model_architecture('transformer_lm', 'normformer')\ndef f(args): pass\n",
            "--arch normformer: another plugin registered that name",
        ),
        (
            "@register_model('normplugin_lm')\nclass M(TransformerLanguageModel): pass\n",
            # fairseq 0.12.2 refuses by itself
            "(model 'normplugin_lm': another plugin registered that name"
            "|Cannot register duplicate model [(]normplugin_lm[)])",
        ),
    ],
)
def test_a_name_taken_by_another_plugin_stops(claim, message, tmp_path):
    """A clash in fairseq's registries ends with a sentence, although fairseq lets one pass."""
    code = (
        "from fairseq.models import register_model, register_model_architecture\n"
        "from fairseq.models.transformer_lm import TransformerLanguageModel\n"
        f"{claim}import normplugin.fairseq_plugin\n"
    )
    done = run(code, tmp_path)
    assert done.returncode != 0 and re.search(message, done.stderr)


def test_without_fairseq_one_sentence(tmp_path):
    """Without fairseq the plugin names the extra to install."""
    code = "import sys; sys.modules['fairseq'] = None; import normplugin.fairseq_plugin"
    done = run(code, tmp_path)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].endswith("pip install 'normplugin[fairseq]'.")


def test_every_option_is_declared_with_help():
    """The options after --arch are the config's fields, each with a help text."""
    parser = argparse.ArgumentParser()
    NormLanguageModel.add_args(parser)
    shown = {action.dest: action.help for action in parser._actions}
    ours = set(vars(NormLanguageModelConfig())) - set(vars(TransformerLanguageModelConfig()))
    assert len(ours) == 10
    assert all(shown[name] for name in ours)


def test_misspelt_names(fairseq):
    """An unknown --arch lists ours; an unknown option ends the run; from a foreign folder."""
    refused = fairseq("train", "data", "--arch", "periln_tny", ok=False)
    assert refused.returncode == 2 and "'periln_tiny'" in refused.stderr
    refused = fairseq("train", "data", "--arch", "periln_tiny", "--norm-shceme", "A", ok=False)
    assert refused.returncode == 2 and "--norm-shceme" in refused.stderr


def test_examples_work_as_user_dirs_when_copied(tmp_path):
    """An example folder carries no code of its own: a copy elsewhere registers the same."""
    copy = tmp_path / "my_experiment"
    shutil.copytree(REPO / "examples" / "perioln", copy)
    done = run(BY_PATH.format(str(copy)) + COUNT, tmp_path)
    assert done.stdout.endswith("ONE\n"), done.stderr[-2000:]
