"""Laws of the whole command, with fairseq's real trainer at a very small scale."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from compare_setup import ARGUMENTS, ROOT

from normplugin.cli import main
from normplugin.errors import MissingFrameworkError

pytest.importorskip("fairseq")

OURS, BASELINE = "normformer_tiny", "transformer_lm_gpt"
# Per layer: output norm 2 d, hidden norm 2 ffn, one head scale per head.
NORMFORMER_EXTRA = 4 * (2 * 128 + 2 * 512 + 4)


@pytest.fixture
def again(finished, data, tmp_path, capsys):
    """Return a function that compares again in a copy of the finished folder."""
    out = shutil.copytree(finished[0], tmp_path / "out")

    def start(*arguments):
        code = main(["compare", "--out", str(out), "--data", str(data), *ARGUMENTS, *arguments])
        return code, capsys.readouterr()

    return out, start


def test_two_arms_are_trained_and_compared(finished):
    """The table is printed, baseline first; the extra parameters equal a hand count."""
    _, done = finished
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert [row.split()[1] for row in rows] == [BASELINE, OURS]
    assert f" {NORMFORMER_EXTRA:+,} (" in rows[1]
    assert "one seed per arm: differences of this size are not a result" in done.stdout


def test_the_results_are_the_trainers_own(finished):
    """Upstream's class against ours; equal tokens; the loss is the log's, in nats and per byte."""
    out, _ = finished
    results = json.loads((out / "results.json").read_text())
    base, ours = results["arms"]
    assert (base["model"], base["scheme"]) == ("TransformerLanguageModel", None)
    assert (ours["model"], ours["scheme"]["name"]) == ("NormLanguageModel", "normformer")
    assert base["facts"] == ours["facts"]
    assert base["facts"]["scored tokens"] == results["data"]["splits"]["valid"]["tokens"]
    for arm in results["arms"]:
        log = (out / arm["numbers"]["arm"] / "train.log").read_text()
        bits = float(log.partition('"valid_loss": "')[2].partition('"')[0])
        assert arm["numbers"]["loss"] == pytest.approx(bits * 0.693147, abs=4e-4)
        assert arm["numbers"]["peak_memory_bytes"] > 2**26
    assert (out / "report.md").read_text().startswith("# Comparison")


def test_finished_arms_are_taken_as_they_are(again):
    """The same command trains nothing and writes the same results."""
    out, start = again
    before = {path: path.read_bytes() for path in sorted(out.rglob("*.*"))}
    code, said = start()
    assert code == 0
    assert said.err.count("taken as it is") == 2
    assert {path: path.read_bytes() for path in sorted(out.rglob("*.*"))} == before


def test_finished_arms_of_other_settings_are_not_overwritten(again):
    """Another learning rate in the same folder is refused by name, before any work."""
    code, said = again[1]("--lr", "0.004")
    assert code == 2
    assert "with other --lr. Name a new --out, or pass --force" in said.err


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (f"{OURS} --seed 2", "seed: got 2 for arm"),
        (f"{OURS} --tokens-per-sample 64", "window: got 64 for arm"),
        (f"{OURS} --batch-size 8", "batch size: got 8 for arm"),
        (f"{OURS} --update-freq 2", "update frequency: got [2] for arm"),
        (f"{OURS} --no-such-option", "unrecognized arguments: --no-such-option"),
        (f"{OURS} --norm-scheme A+C", "whose name promises 'normformer'"),
        ("normfomer_tiny", "Did you mean 'normformer_tiny'?"),
        ("transformer_lm_gtp", "Did you mean 'transformer_lm_gpt'?"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_it_is_trained(again, arm, message):
    """Unequal settings, options fairseq does not take, unknown names: nothing is started."""
    out, start = again
    before = sorted(out.iterdir())
    code, said = start("--arms", arm)
    assert code == 2
    assert message in said.err
    assert sorted(out.iterdir()) == before


def test_runs_that_differ_are_not_ranked(again):
    """A recorded fact that differs is refused by name; the switch makes it a warning."""
    out, start = again
    path = out / OURS / "result.json"
    result = json.loads(path.read_text())
    result["run"]["record"]["facts"]["vocabulary"] = 99
    path.write_text(json.dumps(result))
    code, said = start()
    assert code == 2
    assert f"vocabulary: got 99 for arm '{OURS}'" in said.err
    assert said.out == ""
    code, said = start("--allow-mismatch")
    assert code == 0
    assert f"not comparable: vocabulary: got 99 for arm '{OURS}'" in said.out


def test_a_failing_arm_shows_its_last_words(again):
    """The error has the trainer's message and the log's path; there is no result of it."""
    out, start = again
    code, said = start("--arms", "periln_tiny --finetune-from-model no_such_file.pt")
    assert code == 2
    folder = out / "periln_tiny_finetune-from-model_no_such_file.pt"
    assert "exit status 1 from its trainer" in said.err
    assert "ValueError" in said.err and "no_such_file.pt" in said.err
    assert f"Read {folder / 'train.log'}" in said.err
    assert not (folder / "result.json").exists()


def test_without_fairseq_the_extra_is_named(again, monkeypatch):
    """A fairseq that does not import is a missing framework, not a traceback."""
    monkeypatch.setitem(sys.modules, "fairseq_cli.train", None)
    code, said = again[1]()
    assert code == 2
    assert "Install normplugin[fairseq]" in said.err
    assert issubclass(MissingFrameworkError, ImportError)


def test_ctrl_c_ends_the_trainer_and_keeps_no_result(data, tmp_path):
    """The child is gone, exit 130, and nothing looks finished."""
    arguments = ["--out", "out", "--data", str(data), "--updates", "1000", "--threads", "1"]
    parent = subprocess.Popen(
        [sys.executable, "-m", "normplugin", "compare", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A runner in the background may ignore the signal, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    log = tmp_path / "out" / BASELINE / "train.log"
    for _ in range(600):
        if log.exists() and log.stat().st_size:
            break
        time.sleep(0.1)
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=60)
    assert parent.returncode == 130, said
    assert "interrupted" in said
    with pytest.raises(ProcessLookupError):
        os.killpg(parent.pid, 0)
    assert not list(tmp_path.rglob("result*.json"))
