"""Megatron's own trainer, measured: the same losses, and numbers that do not depend on the layout.

All runs go on from one checkpoint of one process: iteration 3 has the same weights and batch.
"""

from __future__ import annotations

import importlib.util
import shutil
import statistics as stdlib_module
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_trainer import (
    ENTRY,
    LAUNCH,
    TINY,
    TP2,
    data_options,
    environment,
    execute,
    losses,
    torchrun,
)

from normplugin.cli import main
from normplugin.diagnostics import records

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip("megatron-core before 0.17 has no trainer", allow_module_level=True)
SCHEME = "--norm-scheme A+C --norm-zero-centered --residual-scale --embedding-norm".split()
STILL = "--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --train-iters 3".split()
WEIGHTS_ONLY = ["--no-load-optim", "--no-load-rng"]
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = {
    "tensor and sequence parallel, recomputed": [*TP2, *RECOMPUTE.split()],
    "pipeline parallel": ["--pipeline-model-parallel-size", "2"],
    "distributed optimizer": ["--use-distributed-optimizer"],
}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Train a tiny GPT under the CPU emulation, to iteration 3; return all it printed."""
    folder = tmp_path_factory.mktemp("runs")
    library = Path(stdlib_module.__file__).parent
    files = [str(library / "argparse.py"), "--valid", str(library / "textwrap.py")]
    sizes = "--vocab-size 400 --document file --frameworks megatron --quiet".split()
    assert main(["prepare", *files, "--out", str(folder / "data"), *sizes]) == 0

    def run(processes: int, *options: object) -> str:
        words = [ENTRY, *TINY, *data_options(folder / "data"), *STILL, *options]
        return execute(torchrun(processes, *words), folder)

    run.data = folder / "data"
    return run


@pytest.fixture(scope="module")
def plain(train, tmp_path_factory) -> tuple[Path, str, Path]:
    """A run without diagnostics: its checkpoint of iteration 2, its log, and the data."""
    folder = tmp_path_factory.mktemp("checkpoint")
    log = train(1, *SCHEME, "--save", folder, "--save-interval", 2)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    return folder, log, train.data


@pytest.fixture(scope="module")
def one(train, plain, tmp_path_factory) -> tuple[dict, str]:
    """The numbers of one process, and its log."""
    file = tmp_path_factory.mktemp("one") / "d.jsonl"
    watch = ["--diagnostics-interval", 3, "--diagnostics-file", file]
    log = train(1, *SCHEME, "--load", plain[0], *watch, "--tensorboard-dir", file.parent)
    assert hashes(file) == {3: None}  # of its batches, the run saw update 3's only
    return numbers(file), log


def numbers(file: Path) -> dict:
    found, warnings = records.read(file)
    assert warnings == [] and len(file.read_text().splitlines()) == len(found)
    return {r.place: r.value for r in found if r.name != records.BATCHES}


def hashes(file: Path) -> dict[int, float | None]:
    return {r.update: r.value for r in records.read(file)[0] if r.name == records.BATCHES}


def test_batches_are_told_apart_by_their_seed_alone(train, tmp_path):
    """Whatever the scheme and the ranks that share a batch."""
    runs = {
        "one": (1,),
        "pipeline": (2, "--pipeline-model-parallel-size", 2, *SCHEME),
        "tensor": (2, *TP2, "--norm-scheme", "normformer"),
        "other": (1, "--seed", 7),
    }
    for name, (processes, *options) in runs.items():
        file = tmp_path / name
        train(processes, *options, "--diagnostics-interval", 2, "--diagnostics-file", file)
    one = hashes(tmp_path / "one")
    assert one.keys() == {1, 2} and None not in one.values() and one[1] != one[2]
    assert hashes(tmp_path / "pipeline") == hashes(tmp_path / "tensor") == one
    assert not one.items() & hashes(tmp_path / "other").items()


def test_the_loss_is_that_of_a_plain_run(plain, one):
    """To every printed digit; the whole gradient norm is Megatron's own."""
    found, log = one
    assert losses(log)[3] == pytest.approx(losses(plain[1])[3], abs=3e-6)
    assert f"grad norm: {losses(plain[1])[3][1]}" in log
    assert {key[0] for key in found} == {3}
    total = found[(3, "", None, "run", "gradient_norm")]
    assert total == pytest.approx(losses(log)[3][1], abs=6e-4)
    assert None not in found.values()
    for part in ("stream", "ffn"):
        assert {key[2] for key in found if key[3] == part} - {0} == {1, 2}


def test_gains_are_those_applied(one):
    """Zero-centred gains are reported as 1 + w, scales as they are."""
    found, _ = one
    for part in ("attention.input", "attention.residual", "ffn.residual_scale"):
        assert found[(3, "decoder", 1, part, "gain_mean")] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_report_what_one_does(layout, train, plain, one, tmp_path):
    """One file, written once, global layer numbers, equal numbers."""
    file = tmp_path / "d.jsonl"
    watch = ["--diagnostics-interval", 3, "--diagnostics-file", file]
    train(2, *SCHEME, "--load", plain[0], *WEIGHTS_ONLY, *LAYOUTS[layout], *watch)
    found, expected = numbers(file), one[0]
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # fp32 sums in another order; the largest contribution is a difference of larger numbers
        assert found[key] == pytest.approx(value, rel=3e-5, abs=1e-7), key


def test_diagnose_measures_a_checkpoint_as_training_would(train, plain, tmp_path, capsys):
    """The same weights and batches give the same numbers, from the folder or one iteration's."""
    data, out = plain[2], tmp_path / "out"
    again = ["--load", plain[0], "--finetune", *WEIGHTS_ONLY, "--train-iters", 1]
    file = tmp_path / "d.jsonl"
    train(1, *SCHEME, *again, "--diagnostics-interval", 1, "--diagnostics-file", file)
    words = ["--data", str(data), "--subset", "train", "--batches", "2", "--cpu"]
    assert main(["diagnose", str(plain[0]), *words, "--out", str(out)]) == 0
    expected = {(2, *place[1:]): value for place, value in numbers(file).items()}
    assert numbers(out) == expected
    printed = capsys.readouterr().out
    assert "update 2, train, 2 batches" in printed and "attention.residual" in printed
    assert main(["diagnose", str(plain[0] / "iter_0000002"), *words]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == printed.splitlines()[1:]


def test_diagnose_has_no_dropout(train, plain, tmp_path):
    """Half of what a sublayer computes would be dropped, and the rest doubled; of two ranks."""
    save = ["--save", tmp_path / "c", "--save-interval", 2, "--hidden-dropout", 0.5]
    train(2, "--norm-scheme", "preln", *TP2, *save, "--train-iters", 2)
    out = tmp_path / "out"
    words = ["diagnose", str(tmp_path / "c"), "--data", str(plain[2]), "--out", str(out)]
    assert main([*words, "--cpu", "--batches", "1"]) == 0
    found = numbers(out)
    for layer in (1, 2):
        raw = found[(2, "decoder", layer, "ffn", "raw_variance")]
        assert found[(2, "decoder", layer, "ffn", "contribution_variance")] == pytest.approx(raw)


def test_diagnose_refuses_in_one_sentence(plain, tmp_path, capsys):
    """What is not there, and a trainer that fails."""
    checkpoint = str(plain[0])
    (tmp_path / "iter_0000009").mkdir()
    broken = tmp_path / "data"
    shutil.copytree(plain[2], broken)
    (broken / "spm.model").write_bytes(b"no model")
    for path, data, message in (
        (checkpoint, tmp_path, "it has no megatron/valid_text_document.bin. Prepare it with"),
        (tmp_path / "iter_0000009", plain[2], "got no arguments of iteration 9"),
        (checkpoint, broken, "Megatron's trainer ended with exit status 1 and said: "),
    ):
        assert main(["diagnose", str(path), "--data", str(data), "--cpu"]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("entry", [[ENTRY], [LAUNCH, __file__]])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--diagnostics-interval 3", "--diagnostics-interval: got it without --diagnostics-file."),
        ("--diagnostics-file x", "--diagnostics-file: got it without --diagnostics-interval."),
        ("--diagnostics-interval no --diagnostics-file x", "--diagnostics-interval: got 'no';"),
    ],
)
def test_bad_options_are_one_sentence(entry, options, message):
    """Exit code 2 before Megatron is imported."""
    command = [sys.executable, "-m", *entry, *options.split()]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2
    assert f"error: {message}" in done.stderr


def test_cuda_graphs_are_refused(monkeypatch):
    """Their replays pass no hook."""
    monkeypatch.setattr(sys, "argv", ["x"])
    from types import SimpleNamespace

    from normplugin.diagnostics.megatron_train import _check
    from normplugin.diagnostics.options import DiagnosticsError

    _check(SimpleNamespace(cuda_graph_impl="none", enable_cuda_graph=False))
    with pytest.raises(DiagnosticsError, match="--cuda-graph-impl: got 'local' with --diagnost"):
        _check(SimpleNamespace(cuda_graph_impl="local"))
