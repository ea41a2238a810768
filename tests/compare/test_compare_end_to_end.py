"""Laws of the whole command, with fairseq's real trainer at a very small scale."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from compare_setup import ARGUMENTS, nats

from normplugin.cli import main
from normplugin.compare import process, results
from normplugin.compare.arms import parse
from normplugin.compare.frameworks import Dataset, framework
from normplugin.compare.plan import Job, Settings, jobs
from normplugin.data import manifest
from normplugin.errors import MissingFrameworkError

pytest.importorskip("fairseq")

# Per layer: output norm 2 d, hidden norm 2 ffn, one head scale per head.
NORMFORMER_EXTRA = 4 * (2 * 128 + 2 * 512 + 4)
RUN = "lr0.002_seed1"


@pytest.fixture
def again(finished, data, tmp_path, capsys):
    """Return a function that compares again in a copy of the finished folder."""
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    for path in out.rglob("*.json"):  # the folder stands in all of them
        path.write_text(path.read_text().replace(str(finished[0]), str(out)))

    def start(*arguments):
        code = main(["compare", "--out", str(out), "--data", str(data), *ARGUMENTS, *arguments])
        return code, capsys.readouterr()

    return out, start


def contents(out):
    """Every file of a folder and its bytes, but for the lock."""
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.name != "lock"]
    return {path: path.read_bytes() for path in files}


def test_two_arms_are_trained_and_compared(finished):
    """The table is printed, baseline first; the extra parameters equal a hand count."""
    _, printed, said = finished
    rows = [line for line in printed.splitlines() if line.startswith("|")][2:]
    assert [row.split()[1] for row in rows] == ["upstream", "normformer"]
    assert f" ({NORMFORMER_EXTRA:+,}) " in rows[1]
    assert "one seed per arm: differences of this size are not a result" in printed
    assert re.search(
        r"\[1/2\] upstream lr 0.002 seed 1: finished, loss .* about 00:\d\d left", said
    )


def test_the_results_are_the_trainers_own(finished):
    """Equal tokens; curves; the final loss is the log's, in nats, with more digits."""
    found = results.read(finished[0] / results.NAME)
    base, ours = found.arms
    assert (base.scheme, ours.scheme) == (None, "normformer")
    assert found.facts["scored tokens"] == found.data["splits"]["valid"]["tokens"]
    for arm in found.arms:
        (run,) = arm.runs
        log = Path(run.log).read_text()
        assert " | INFO | train_inner | {" in log  # as fairseq-train writes it
        bits = re.findall(r'"valid_loss": "([\d.]+)"', log)
        assert arm.loss.mean == pytest.approx(nats(float(bits[-1])), abs=4e-4)
        assert arm.loss.mean == run.valid[-1].loss != nats(float(bits[-1]))
        assert [point.update for point in run.valid] == [2, 4, 6]
        assert [point.update for point in run.train] == [1, 2, 3, 4, 5, 6]
        assert run.train[-1].tokens == run.valid[-1].tokens == found.facts["trained tokens"]
        assert run.peak_memory_bytes > 2**26
        assert len(Path(run.diagnostics).read_text().splitlines()) > 100


def test_finished_runs_are_taken_as_they_are(again):
    """The same command trains nothing and writes the same results."""
    out, start = again
    start()  # the page of the copied folder
    before = contents(out)
    code, said = start()
    assert code == 0
    assert said.err.count("taken as it is") == 2
    assert contents(out) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--updates", "7"), "a comparison with other --updates is kept"),
        (("--window", "64"), "a comparison with other --window is kept"),
        (("--", "--weight-decay", "0.1"), "a comparison with other --extra is kept"),
        (("--arms", "normformer+seed=2"), "seed: got 2 for 'normformer+seed=2 lr 0.002 seed 1'"),
        (("--arms", "preln+tokens-per-sample=64"), "window: got 64 for"),
        (("--arms", "preln+batch-size=8"), "batch size: got 8 for"),
        (("--arms", "preln+update-freq=2"), "update frequency: got [2] for"),
        (("--arms", "preln+dropout=0.1"), "pass --allow-mismatch dropout to be warned"),
        (("--arms", "preln+no-such-option"), "unrecognized arguments: --no-such-option"),
        (("--arms", "normfomer"), "Did you mean 'normformer'?"),
        (("--data", "nowhere"), "it has no manifest.json"),
        (("--kind", "mt"), "it needs pairs"),
        (("--updates", "6", "typo"), "got 'typo'; legal are options"),
        (("--lr", "1e-3;2e-3"), "legal are numbers, separated by commas"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_it_is_trained(again, arguments, message):
    """Other settings, options fairseq does not take, unknown names: nothing is touched."""
    out, start = again
    before = contents(out)
    code, said = start(*arguments)
    assert code == 2
    assert message in said.err
    assert contents(out) == before


def test_data_that_changed_since_is_refused(again, data, tmp_path):
    """Its manifest no longer fits; and other data with a manifest is another comparison."""
    _, start = again
    changed = shutil.copytree(data, tmp_path / "changed")
    (changed / "fairseq" / "valid.bin").write_bytes(b"other")
    assert "valid.bin; the manifest says" in start("--data", str(changed))[1].err
    book = json.loads((changed / "manifest.json").read_text())
    book["files"]["fairseq/valid.bin"] = manifest.sha256(changed / "fairseq" / "valid.bin")
    (changed / "manifest.json").write_text(json.dumps(book))
    assert "a comparison with other --data is kept" in start("--data", str(changed))[1].err


def test_runs_that_differ_are_not_ranked(again):
    """A recorded fact that differs is refused by name; the switch makes it a warning."""
    out, start = again
    path = out / "runs" / "normformer" / RUN / "result.json"
    result = json.loads(path.read_text())
    result["done"]["record"]["facts"]["log base"] = 2.718281828459045
    path.write_text(json.dumps(result))
    code, said = start()
    assert code == 2
    assert "log base: got 2.718281828459045 for 'normformer" in said.err
    assert said.out == ""
    code, said = start("--allow-mismatch", "log-base")
    assert code == 0
    assert "not comparable: log base: got 2.718281828459045 for 'normformer" in said.out


def test_a_result_that_cannot_be_read_is_refused(again):
    """Cut short, or of another version: by name, and nothing is overwritten."""
    out, start = again
    path = out / "runs" / "normformer" / RUN / "result.json"
    text = path.read_text()
    path.write_text(text[:100])
    assert "got a result that cannot be read" in start()[1].err
    path.write_text(text.replace('"format": 2', '"format": 1'))
    assert "with other format. Name a new --out" in start()[1].err
    assert path.read_text() != text


def test_a_failing_arm_is_reported_and_the_others_go_on(again):
    """Failed at update 0 with the trainer's message; the arm that finished is ranked."""
    out, start = again
    name = "periln+finetune-from-model=no_such_file.pt"
    code, said = start("--arms", f"{name},normformer")
    assert code == 0, said.err
    assert f"caution: {name} at learning rate 0.002 with seed 1 failed at update 0:" in said.out
    assert "no_such_file.pt" in said.out
    upstream, failed, finished = results.read(out / results.NAME).arms
    assert [failed.verdict, failed.runs[0].status] == ["failed", "failed"]
    assert (upstream.verdict, finished.verdict) == ("baseline", "one seed")


def test_without_fairseq_the_extra_is_named(again, monkeypatch):
    """A fairseq that does not import is a missing framework, not a traceback."""
    monkeypatch.setitem(sys.modules, "fairseq_cli.train", None)
    code, said = again[1]()
    assert code == 2
    assert "Install normplugin[fairseq]" in said.err
    assert issubclass(MissingFrameworkError, ImportError)


@pytest.mark.parametrize("kind", ["lm", "mlm", "mt"])
def test_upstreams_model_of_every_kind_is_comparable_with_ours(kind, data, text, prepared):
    """By fairseq's own configuration of both, and all that is compared of it."""
    folder = data
    if kind == "mt":
        folder = prepared("pairs", "--source", str(text), "--target", str(text))
    at, settings = framework("fairseq"), Settings(kind=kind)
    book = Dataset(folder, manifest.load(folder), "fairseq")
    base, *others = (
        at.arms.facts(job, settings, book)
        for job in jobs(parse(["normformer,A+C,periln+norm-type=rmsnorm"]), settings, folder)
    )
    assert base["optimizer"] == "adam" and base["learning rate"] == [0.002]
    assert [facts == base for facts in others] == [True] * 3


def processes_of(out):
    """The ids of what runs for a comparison."""
    mark = f"{process._MARK}={out}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += [int(path.parent.name)] if mark in path.read_bytes() else []
        except OSError:
            pass
    return found


def wait_for_checkpoint(log, tool):
    """Wait until a run has saved its first checkpoint."""
    for _ in range(4800):
        text = log.read_text(errors="replace") if log.exists() else ""
        if "Saved checkpoint" in text or "successfully saved checkpoint" in text:
            return
        assert tool.poll() is None, tool.communicate()
        time.sleep(0.05)
    raise AssertionError(text[-2000:])


def test_kill_nine_of_the_tool_and_of_an_arm_lose_nothing(finished, data, started, tmp_path):
    """The results are those of the undisturbed comparison; the killed went on from checkpoints."""
    arguments = ("--out", "out", "--data", data, *ARGUMENTS)
    runs = tmp_path / "out" / "runs"
    tool = started(*arguments, cwd=tmp_path)
    wait_for_checkpoint(runs / "upstream" / RUN / "train.log", tool)
    tool.kill()
    tool.communicate()
    for _ in range(100):
        if not processes_of(tmp_path / "out"):
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the trainer survived its tool")

    tool = started(*arguments, cwd=tmp_path)
    wait_for_checkpoint(runs / "normformer" / RUN / "train.log", tool)
    for pid in processes_of(tmp_path / "out"):
        os.kill(pid, signal.SIGKILL)
    _, said = tool.communicate(timeout=300)
    assert tool.returncode == 0, said
    assert "its trainer was killed or failed; going on from its checkpoint" in said
    ours, theirs = (results.read(out / results.NAME) for out in (tmp_path / "out", finished[0]))
    for mine, other in zip(ours.arms, theirs.arms, strict=True):
        assert mine.loss == other.loss
        assert [p.loss for p in mine.runs[0].train] == [p.loss for p in other.runs[0].train]
        assert [p.tokens for p in mine.runs[0].valid] == [p.tokens for p in other.runs[0].valid]
        assert "Loaded checkpoint" in Path(mine.runs[0].log).read_text()
    assert ours.facts == theirs.facts


def test_ctrl_c_ends_the_trainer_and_keeps_no_result(data, started, tmp_path):
    """The child is gone, exit 130, and nothing looks finished."""
    arguments = ("--out", "out", "--data", data, "--updates", "1000", "--threads", "1")
    # A runner in the background may ignore the signal, and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        tool = started(*arguments, cwd=tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    log = tmp_path / "out" / "runs" / "upstream" / RUN / "train.log"
    for _ in range(600):
        if log.exists() and log.stat().st_size:
            break
        time.sleep(0.1)
    tool.send_signal(signal.SIGINT)
    _, said = tool.communicate(timeout=60)
    assert tool.returncode == 130, said
    assert "interrupted" in said
    assert not processes_of(tmp_path / "out")
    assert not list(tmp_path.rglob("result*.json"))


def test_a_folder_name_tells_arms_apart(tmp_path):
    """Options are in it; separators and blanks are not."""
    arms = parse(["preln+adam-betas=(0.9, 0.95)", "preln+restore-file=../../b"])
    names = [Job(arm, 1e-3, 1, tmp_path).arm.folder for arm in arms]
    assert names == ["upstream", "preln+adam-betas=_0.9_0.95", "preln+restore-file=.._.._b"]
