"""fairseq's own training, measured: the same losses, and numbers that do not depend on the way."""

from __future__ import annotations

import json
import logging
import math
import socket
import statistics as stdlib_module
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq_cli import train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import normplugin.fairseq_plugin
from normplugin.cli import main
from normplugin.diagnostics import fairseq_train, records

TINY = ["--arch", "normformer_tiny", "--decoder-layers", "2"]
UPSTREAM = "--arch transformer_lm_gpt --decoder-layers 2 --decoder-embed-dim 32".split()
UPSTREAM += "--decoder-ffn-embed-dim 64 --decoder-attention-heads 4".split()
STILL = "--dropout 0 --attention-dropout 0".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A prepared folder, for fairseq."""
    library = Path(stdlib_module.__file__).parent
    out = tmp_path_factory.mktemp("prepared") / "out"
    files = [str(library / "argparse.py"), "--valid", str(library / "textwrap.py")]
    sizes = "--vocab-size 400 --document file --frameworks fairseq --quiet".split()
    assert main(["prepare", *files, "--out", str(out), *sizes]) == 0
    return out


def training(data: Path, *options: object) -> list[str]:
    fixed = (
        "--task language_modeling --tokens-per-sample 32 --share-decoder-input-output-embed "
        "--optimizer adam --lr 1e-3 --max-update 4 --cpu --num-workers 0 --log-format json "
        "--log-interval 1 --disable-validation --no-epoch-checkpoints"
    ).split()
    batch = [] if "--batch-size" in options else ["--batch-size", "8"]
    return [str(data / "fairseq"), *fixed, *batch, *map(str, options)]


@pytest.fixture
def run(data, tmp_path, monkeypatch, caplog):
    """Train in this process; return the records, the log of updates and the weights."""
    monkeypatch.setattr(train, "Trainer", train.Trainer)  # put back afterwards
    caplog.set_level(logging.INFO)
    folders = iter(tmp_path / str(i) for i in range(9))

    def start(*options: object, interval: int | None = 2):
        folder = next(folders)
        argv = training(data, *options, "--save-dir", folder)
        caplog.clear()
        if interval is None:
            monkeypatch.setattr(sys, "argv", ["fairseq-train", *argv])
            train.cli_main()
            found = []
        else:
            assert fairseq_train.main([*argv, "--diagnostics-interval", str(interval)]) == 0
            file = folder / "diagnostics.jsonl"
            found, warnings = records.read(file)
            assert warnings == [] and len(file.read_text().splitlines()) == len(found)
        steps = [json.loads(r.message) for r in caplog.records if r.name == "train_inner"]
        state = torch.load(folder / "checkpoint_last.pt", weights_only=True)
        return {r.place: r.value for r in found}, steps, state["model"]

    return start


def losses(steps: list[dict]) -> list[tuple[str, str]]:
    return [(step["loss"], step["gnorm"]) for step in steps]


def assert_near(found: dict, expected: dict, rel: float) -> None:
    """Equal keys, equal nulls, values within rel; batches may be cut otherwise."""
    assert found.keys() == expected.keys() and found
    for key, value in expected.items():
        if key[-1] == records.BATCHES:
            continue
        if value is None or found[key] is None:
            assert value is found[key], key
        else:
            assert found[key] == pytest.approx(value, rel=rel, abs=1e-8), key


@pytest.mark.parametrize(
    "argv",
    [
        [*TINY, "--decoder-layerdrop", "0.5", "--decoder-layers", "3"],
        [*UPSTREAM, "--activation-dropout", "0.1"],
    ],
    ids=["ours", "upstream"],
)
def test_training_is_bit_identical(argv, run, tmp_path):
    """With dropout and LayerDrop: weights, losses and gradient norms are those of a plain run.

    The whole gradient norm is fairseq's own; updates are the first and every second one; the same
    numbers are in tensorboard.
    """
    _, plain_steps, plain = run(*argv, interval=None)
    found, steps, weights = run(*argv, "--tensorboard-logdir", tmp_path / "tb")
    assert losses(steps) == losses(plain_steps) and len(steps) == 4
    for name, value in plain.items():
        if not name.endswith("_float_tensor"):  # a marker that fairseq 0.12.2 leaves unset
            assert torch.equal(weights[name], value), name
    assert {key[0] for key in found} == {1, 2, 4}
    for update in (1, 2, 4):
        total = found[(update, "", None, "run", "gradient_norm")]
        assert total == pytest.approx(float(steps[update - 1]["gnorm"]), abs=6e-4)
    events = EventAccumulator(str(tmp_path / "tb" / "diagnostics")).Reload()
    (first, *_) = events.Scalars("run.gradient_norm/run.all")
    expected = found[(1, "", None, "run", "gradient_norm")]
    assert (first.step, first.value) == (1, pytest.approx(expected))
    layers = 3 if "--decoder-layerdrop" in argv else 2
    assert {key[2] for key in found} == {None, *range(layers + 1)}
    skipped = {key[2] for key, value in found.items() if value is None and key[2]}
    assert bool(skipped) == ("--decoder-layerdrop" in argv)


def test_micro_batches_clipping_and_recomputation_change_no_number(run):
    """--update-freq 2 is one batch of twice the size; clipping comes later; recomputing is free."""
    still = [*TINY, *STILL, "--max-update", 1, "--curriculum", 1]  # batches in their order
    one, _, _ = run(*still, "--batch-size", 16)
    options = ["--update-freq", 2, "--clip-norm", 0.01, "--checkpoint-activations"]
    two, steps, _ = run(*still, *options)
    assert float(steps[0]["gnorm"]) > 0.1  # so it was clipped
    assert_near(two, one, rel=2e-5)


def test_half_precision_is_unscaled_and_overflows_are_skipped(run, monkeypatch):
    """Loss-scaled fp16 gives fp32's gradients; an overflowed update is counted, not recorded."""
    # fairseq's overflow branch says .cuda() also on a CPU
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    wide, _, _ = run(*TINY, *STILL, "--max-update", 1)
    half, _, _ = run(*TINY, *STILL, "--memory-efficient-fp16", "--max-update", 1)
    for name in ("gradient_norm", "gradient_mean_abs"):
        key = (1, "decoder", 2, "fc2", name)
        assert half[key] == pytest.approx(wide[key], rel=0.02)
    scale = ["--fp16-init-scale", 2**20, "--max-update", 2]
    found, steps, _ = run(*TINY, *STILL, "--memory-efficient-fp16", *scale)
    assert all(math.isfinite(v) for v in found.values() if v is not None)
    assert found[(1, "", None, "run", "skipped_updates")] >= 1
    assert found[(2, "", None, "run", "gradient_norm")] == pytest.approx(
        float(steps[-1]["gnorm"]), abs=6e-4
    )


def test_two_processes_report_what_one_does(run, data, tmp_path):
    """Two gloo processes write one file, with the numbers of one process with --update-freq 2."""
    options = [*TINY, *STILL, "--max-update", 2, "--clip-norm", 1.0]
    one, _, _ = run(*options, "--update-freq", 2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    words = training(
        data, *options, "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp",
        "--distributed-world-size", 2, "--distributed-no-spawn", "--user-dir",
        Path(normplugin.fairseq_plugin.__file__).parent, "--save-dir", tmp_path / "two",
        "--distributed-init-method", address, "--diagnostics-interval", 2,
    )  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", fairseq_train.__name__, *words, "--distributed-rank", str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output[-3000:]
    path = tmp_path / "two" / "diagnostics.jsonl"
    two = {r.place: r.value for r in records.read(path)[0]}
    assert len(path.read_text().splitlines()) == len(two)
    # After one Adam step of 1e-3: fp32 sums in another order
    assert_near(two, one, rel=2e-3)
    first = {key: value for key, value in one.items() if key[0] == 1}
    assert_near({key: two[key] for key in first}, first, rel=2e-5)


def test_bad_options_are_one_sentence(data, capsys):
    """Exit code 2 and what to do."""
    for options, message in (
        (["--diagnostics-interval", "0"], "--diagnostics-interval: got '0'; legal are"),
        (
            ["--diagnostics-interval", "2", "--ddp-backend", "fully_sharded"],
            "--ddp-backend: got 'fully_sharded' with --diagnostics-interval; it keeps no",
        ),
        (
            ["--diagnostics-interval", "2", "--use-bmuf"],
            "--use-bmuf: got it with --diagnostics-interval, which cannot measure it.",
        ),
    ):
        assert fairseq_train.main([*training(data, *TINY), *options]) == 2
        assert f"fairseq_train: error: {message}" in capsys.readouterr().err


def test_diagnose_measures_a_checkpoint(run, data, tmp_path, capsys):
    """A table and records of the update, the same twice; clear refusals."""
    run(*TINY, interval=None)
    checkpoint = str(tmp_path / "0" / "checkpoint_last.pt")
    argv = ["diagnose", checkpoint, "--data", str(data), "--batches", "2", "--cpu", "--out"]
    for out in ("a", "b"):
        assert main([*argv, str(tmp_path / out)]) == 0
    printed = capsys.readouterr().out
    assert "decoder: gains, mean [min max]" in printed and "fp16 bits" in printed
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    found, warnings = records.read(tmp_path / "a")
    assert not warnings and {r.update for r in found} == {4}
    assert None not in [r.value for r in found]
    (tmp_path / "cut.pt").write_bytes(Path(checkpoint).read_bytes()[:20000])
    for words, message in (
        ([*argv, str(tmp_path / "a")], r"--out: got .*a, which exists; nothing is overwritten\."),
        (["diagnose", "none.pt", "--data", str(data)], "none.pt: got no such file; legal are"),
        (["diagnose", checkpoint, "--data", str(tmp_path)], "it holds no fairseq data"),
        (["diagnose", str(tmp_path / "cut.pt"), "--data", str(data)], "fairseq cannot load it"),
        ([*argv[:4], "--batches", "0"], "--batches: got 0; legal are numbers from 1 on."),
        ([*argv[:4], "--subset", "exam"], "--subset: got 'exam'; there is no such data"),
    ):
        assert main(words) == 2
        assert "normplugin diagnose: error: " in (text := capsys.readouterr().err)
        assert message.replace("\\", "").split(".*")[0] in text


def test_the_batches_are_the_same_for_every_model_and_others_for_another_seed(run):
    """What a comparison takes for the order of the data, from fairseq's own iterator."""

    def batches(*options):
        found, _, _ = run(*options, interval=2)
        return [value for place, value in found.items() if place[-1] == records.BATCHES]

    ours = batches(*TINY, "--seed", "1")
    assert len(ours) == 3 and None not in ours  # updates 1, 2 and 4
    assert batches(*UPSTREAM, "--seed", "1") == ours
    assert not set(batches(*TINY, "--seed", "2")) & set(ours)
