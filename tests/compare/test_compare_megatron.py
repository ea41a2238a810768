"""Laws of the command with Megatron's real trainer, CUDA emulated, on two processes."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from pathlib import Path

import pytest
from test_compare_end_to_end import processes_of, wait_for_checkpoint

from normplugin.cli import main
from normplugin.compare import results
from normplugin.compare.arms import parse
from normplugin.compare.frameworks import Dataset, framework
from normplugin.compare.plan import Settings, jobs
from normplugin.data import manifest

try:
    found = importlib.util.find_spec("megatron.training")
except ModuleNotFoundError:
    found = None
if found is None:
    pytest.skip("megatron-core before 0.17 has no trainer", allow_module_level=True)
# Per layer: output norm 2 d, hidden norm 2 ffn, one head scale per head.
NORMFORMER_EXTRA = 4 * (2 * 128 + 2 * 512 + 4)
RUN = "lr0.002_seed1"


@pytest.fixture(scope="module")
def corpus(text, prepared) -> Path:
    """Return the text, prepared for Megatron."""
    return prepared("megatron", str(text), "--frameworks", "megatron")


def arguments(corpus: Path) -> list[str]:
    """Four updates, a checkpoint after two, tensor-parallel."""
    return [
        *("--framework", "megatron", "--out", "out", "--data", str(corpus), "--updates", "4"),
        *("--batch", "4", "--threads", "1", "--arms", "normformer", "--tp", "2"),
    ]


def test_a_comparison_that_was_killed_ends_as_it_should(corpus, started, tmp_path):
    """kill -9 of the tool and of a rank: both runs go on from their checkpoints, and are ranked."""
    runs = tmp_path / "out" / "runs"
    tool = started(*arguments(corpus), cwd=tmp_path)
    wait_for_checkpoint(runs / "upstream" / RUN / "train.log", tool)
    tool.kill()
    tool.communicate()

    tool = started(*arguments(corpus), cwd=tmp_path)
    wait_for_checkpoint(runs / "normformer" / RUN / "train.log", tool)
    os.kill(max(processes_of(tmp_path / "out")), signal.SIGKILL)
    printed, said = tool.communicate(timeout=300)
    assert tool.returncode == 0, said
    assert not processes_of(tmp_path / "out")
    assert "CUDA emulated on the CPU: nothing of a GPU's" in printed
    assert "its trainer was killed or failed; going on" in said
    found = results.read(tmp_path / "out" / results.NAME)
    base, ours = found.arms
    assert (base.parameter_delta, ours.parameter_delta) == (0, NORMFORMER_EXTRA)
    for arm in found.arms:
        (run,) = arm.runs
        assert [point.update for point in run.train] in ([1, 2, 3, 4], [1, 2, 4])
        assert [point.update for point in run.valid] == [2, 4]
        assert run.train[-1].tokens == 4 * 4 * 128
        log = Path(run.log).read_text()
        assert re.search(r"successfully loaded checkpoint .* at iteration 2", log)
        last = re.findall(r"validation loss at iteration 4 \| lm loss value: (\S+)", log)[-1]
        assert arm.loss.mean == float(last)
    assert list(corpus.glob("megatron/*/")) == []  # the data's folder is only read


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("preln+seq-length=64", "window: got 64 for"),
        ("preln+seed=2", "seed: got 2 for"),
        ("preln+swiglu", "gated linear unit: got True for"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_it_is_trained(arm, message, corpus, capsys):
    """Facts that the command line already tells."""
    os.chdir(corpus.parent)
    assert main(["compare", *arguments(corpus), "--arms", arm]) == 2
    assert message in capsys.readouterr().err
    assert not (corpus.parent / "out" / "runs").exists()


def test_the_command_is_megatrons_own(corpus):
    """torchrun, our entry point, the scheme's options; a ramp warms up to the last update."""
    at = framework("megatron")
    settings = Settings(framework="megatron", ramp=True, lrs=(2.0,), nproc=2, tp=2)
    data = Dataset(corpus, manifest.load(corpus), "megatron")
    arms = parse(["normformer+residual-scale"])
    base, ours = (at.arms.command(it, settings, data) for it in jobs(arms, settings, corpus))
    line = " ".join(ours)
    assert "-m torch.distributed.run --standalone --nproc-per-node 2" in line
    assert "-m normplugin.megatron_plugin.pretrain_gpt" in line
    assert line.endswith("--norm-scheme normformer --residual-scale")
    assert "--lr-warmup-iters 300 --lr-decay-iters 301" in line
    assert "--norm-scheme" not in base
