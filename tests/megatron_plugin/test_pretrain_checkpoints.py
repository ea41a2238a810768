"""Checkpoints across schemes under Megatron's own trainer: warm start, refusals; tensorboard."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from megatron_trainer import TP2, errors, losses

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip("megatron-core before 0.17 has no trainer", allow_module_level=True)
NORMFORMER = ["--norm-scheme", "normformer"]
FRESH = (
    "self_attention.linear_proj.head_scale, self_attn_bda.output_norm.weight, "
    "self_attn_bda.output_norm.bias, mlp.linear_fc2.hidden_norm.weight, "
    "mlp.linear_fc2.hidden_norm.bias"
)
ITERATION = "iter_0000008"


@pytest.fixture(scope="module")
def stock(train, tmp_path_factory) -> tuple[Path, str]:
    """The folder of a run of Megatron's own model, with its checkpoint, and its log."""
    folder = tmp_path_factory.mktemp("stock")
    board = ["--tensorboard-dir", folder / "board", "--tensorboard-log-interval", 1]
    return folder, train(1, "--save", folder / "saved", "--save-interval", 8, *board)


@pytest.fixture(scope="module")
def warm(stock, train, tmp_path_factory) -> tuple[Path, str]:
    """The checkpoints and the log of NormFormer on two ranks, started from the stock model."""
    folder = tmp_path_factory.mktemp("warm")
    own = ["--save", folder, "--load", folder, "--save-interval", 8]
    pretrained = ["--pretrained-checkpoint", stock[0] / "saved"]
    return folder, train(2, *NORMFORMER, *TP2, *own, *pretrained, "--norm-warm-start")


def test_tensorboard_has_the_losses_of_the_log(stock):
    """Megatron's own writer, read back."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator(str(stock[0] / "board"))
    accumulator.Reload()
    written = {event.step: event.value for event in accumulator.Scalars("lm loss")}
    assert written[8] == pytest.approx(losses(stock[1])[8][0], abs=1e-5)


def test_a_warm_start_names_every_fresh_tensor_and_starts_from_the_checkpoint(stock, warm):
    """Its first loss is below the stock model's first, and the list is printed once."""
    _, log = warm
    assert log.count(f"> warm start: not in the checkpoint, fresh in every layer: {FRESH}\n") == 1
    assert losses(log)[1][0] < losses(stock[1])[1][0] - 0.1


def test_a_warm_started_run_resumes_from_its_own_checkpoint(stock, warm, train):
    """The pretrained checkpoint is not looked at again, and nothing is fresh."""
    folder, _ = warm
    pretrained = ["--pretrained-checkpoint", stock[0] / "saved", "--norm-warm-start"]
    resumed = train(1, *NORMFORMER, "--load", folder, *pretrained, "--skip-train", "--no-load-rng")
    assert "warm start:" not in resumed and "at iteration 8" in resumed


@pytest.mark.parametrize(
    ("scheme", "asked", "words"),
    [
        ("normformer", False, "they differ in the norms of the scheme"),
        ("outputln", True, "a warm start needs a checkpoint of Pre-LN and a scheme that adds"),
        ("A+C", True, "a warm start needs a checkpoint of Pre-LN and a scheme that adds"),
    ],
)
def test_a_stock_checkpoint_is_refused_unless_asked_for(stock, train, scheme, asked, words):
    """Without the option, and for a scheme that does not contain Pre-LN."""
    options = ["--norm-warm-start"] if asked else []
    log = train(
        1,
        "--norm-scheme",
        scheme,
        "--pretrained-checkpoint",
        stock[0] / "saved",
        *options,
        ok=False,
    )
    (error,) = errors(log)
    assert error.startswith("--pretrained-checkpoint: got a checkpoint of Megatron's own model")
    assert words in error and "lm loss" not in log


@pytest.mark.parametrize("option", ["--load", "--pretrained-checkpoint"])
def test_megatrons_own_model_does_not_take_a_schemes_checkpoint(warm, train, option):
    """Megatron would drop the norms without a word."""
    log = train(1, option, warm[0], ok=False)
    (error,) = errors(log)
    assert error.startswith(f"{option}: got a checkpoint of scheme 'normformer'")
    assert "for Megatron's own model" in error and "lm loss" not in log


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "metadata.json"])
def test_a_damaged_checkpoint_is_one_sentence_before_training(warm, train, tmp_path, name):
    """Half a file; what is there stays as it is."""
    folder = tmp_path / "damaged"
    shutil.copytree(warm[0], folder)
    damaged = folder / ITERATION / name
    half = damaged.read_bytes()[: damaged.stat().st_size // 2]
    damaged.write_bytes(half)
    log = train(1, *NORMFORMER, "--load", folder, ok=False)
    (error,) = errors(log)
    assert error.startswith(f"--load: got {folder / ITERATION}, ")
    assert "lm loss" not in log and damaged.read_bytes() == half
