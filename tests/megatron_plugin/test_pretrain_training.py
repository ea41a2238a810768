"""Megatron's own trainer on real text: it learns, survives kill -9, and is exact over TP."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from megatron_trainer import (
    ENTRY,
    LAUNCH,
    TINY,
    TP2,
    data_options,
    environment,
    errors,
    losses,
    torchrun,
    validation_losses,
)

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip("megatron-core before 0.17 has no trainer", allow_module_level=True)
SCHEMES = {
    "normformer": ["--norm-scheme", "normformer", "--residual-scale"],
    "periln": ["--norm-scheme", "periln", "--norm-type", "rmsnorm", "--embedding-norm"],
}
TRACKER = "latest_checkpointed_iteration.txt"
EVALUATE = ["--skip-train", "--no-load-optim", "--no-load-rng"]


@pytest.fixture(scope="module", params=SCHEMES)
def undisturbed(request, train, tmp_path_factory) -> tuple[list[str], Path, str]:
    """The options of a scheme, the checkpoints and the log of a run on two processes, TP and SP."""
    folder = tmp_path_factory.mktemp("checkpoints")
    options = SCHEMES[request.param]
    log = train(2, *options, *TP2, "--save", folder, "--save-interval", 4)
    return options, folder, log


def test_training_learns_and_says_that_cuda_is_emulated(undisturbed):
    """The loss falls, and the banner stands once in the log."""
    _, _, log = undisturbed
    found = losses(log)
    assert list(found) == list(range(1, 9))
    assert found[8][0] < found[1][0] - 0.1
    assert log.count("CUDA is emulated on the CPU") == 1


def test_a_killed_run_resumes_with_the_same_losses(undisturbed, megatron_data, train, tmp_path):
    """After kill -9 behind a checkpoint, the rest is the undisturbed run to every printed digit."""
    options, _, log = undisturbed
    save = [*options, *TP2, "--save", tmp_path / "c", "--load", tmp_path / "c"]
    save += ["--save-interval", 3]
    _kill_after_checkpoint([*data_options(megatron_data), *map(str, save)], tmp_path)
    step = int((tmp_path / "c" / TRACKER).read_text())
    assert step in (3, 6)
    resumed = train(2, *save)
    expected = {i: value for i, value in losses(log).items() if i > step}
    found = losses(resumed)
    assert list(found) == list(expected)
    for i, values in expected.items():
        assert found[i] == pytest.approx(values, abs=3e-6)  # printed with 7 digits, one line twice
    assert validation_losses(resumed)[-1] == validation_losses(log)[-1]


def _kill_after_checkpoint(options: list[str], folder: Path) -> None:
    command = torchrun(2, ENTRY, *TINY, *options)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**environment(), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "successfully saved checkpoint from iteration" in line:
            break
    ranks = psutil.Process(process.pid).children(recursive=True)  # in sessions of their own
    assert len(ranks) >= 2  # and what saves their checkpoints
    for one in (*ranks, process):
        one.kill()
    psutil.wait_procs(ranks, timeout=60)
    assert process.wait(timeout=60) == -signal.SIGKILL
    process.stdout.close()


@pytest.fixture(scope="module")
def on_one_rank(undisturbed, train) -> list[float]:
    """The validation loss of the checkpoint at TP = 1."""
    options, folder, _ = undisturbed
    return validation_losses(train(1, *options, "--load", folder, *EVALUATE))


def test_a_checkpoint_of_two_ranks_loads_on_one(undisturbed, on_one_rank, train):
    """TP = 2 with sequence parallelism and TP = 1 have the same validation loss."""
    options, folder, _ = undisturbed
    two = validation_losses(train(2, *options, *TP2, "--load", folder, *EVALUATE))
    assert len(two) == 1
    assert on_one_rank == pytest.approx(two, rel=1e-5)


def test_the_checkpoint_knows_its_scheme(undisturbed, on_one_rank, train):
    """--use-checkpoint-args takes the scheme and all its options from the checkpoint."""
    _, folder, _ = undisturbed
    taken = validation_losses(train(1, "--use-checkpoint-args", "--load", folder, *EVALUATE))
    assert taken == on_one_rank


def test_another_scheme_than_the_checkpoints_is_refused(undisturbed, train):
    """Before training, in one sentence that names both and the difference."""
    options, folder, _ = undisturbed
    name = options[1]
    log = train(1, "--norm-scheme", "outputln", "--load", folder, *EVALUATE, ok=False)
    (error,) = errors(log)
    assert f"checkpoint of scheme '{name}' in {folder}/iter_0000008 for scheme 'outputln'" in error
    assert "they differ in" in error and error.endswith("or another folder.")
    assert "lm loss" not in log


@pytest.mark.parametrize(
    "layout",
    [
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--pipeline-model-parallel-size 2",
    ],
    ids=["data parallel", "pipeline parallel"],
)
def test_other_layouts_train(layout, train):
    """DP = 2 with the distributed optimizer, and PP = 2."""
    found = losses(train(2, *SCHEMES["normformer"], *layout.split(), "--train-iters", 4))
    assert found[4][0] < found[1][0]


def test_any_script_gets_a_scheme_from_the_launcher(undisturbed, train, tmp_path):
    """A script that knows nothing of our options trains as our own entry point does."""
    options, _, log = undisturbed
    script = tmp_path / "script.py"
    script.write_text("from normplugin.megatron_plugin import gpt\ngpt.pretrain_gpt()\n")
    launched = train(2, *options, *TP2, "--exit-interval", 3, entry=(LAUNCH, script))
    expected = {i: value for i, value in losses(log).items() if i <= 3}
    assert losses(launched) == expected
