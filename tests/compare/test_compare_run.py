"""Laws of one run: how it ended is told by its log; whatever is killed, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from compare_setup import ROOT, job

from normplugin.compare import fairseq_record, process, run
from normplugin.compare.frameworks import LOG, Framework
from normplugin.compare.plan import Settings
from normplugin.compare.record import Step
from normplugin.compare.results import DIVERGED, FAILED

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
# A launcher whose child is in a session of its own, as torchrun's ranks are; both write their ids.
LAUNCHER = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                        start_new_session=True)
print(rank.pid, flush=True)
time.sleep(60)
"""
TOOL = """
import os, sys
from pathlib import Path
from normplugin.compare import process
folder = Path(sys.argv[1])
process.follow([sys.executable, "-c", sys.argv[2]],
               process.environment(folder, "cpu", 1, {}), folder, lambda text: False)
"""
LINE = "2026 | INFO | train_inner | "


def line(update, loss):
    """A training line of fairseq's log."""
    numbers = f'"loss": "{loss}", "ppl": "inf", "wps": "10", "wpb": "20", "num_updates": "{update}"'
    return f"{LINE}{{{numbers}}}\n"


def wait_for(condition):
    """Wait up to 20 seconds for something to become true; return it."""
    for _ in range(200):
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError("it did not happen")


def alive(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_kill_of_the_tool_leaves_no_trainer(tmp_path):
    """kill -9 of the tool ends the launcher at once, and what outlives it before the next start."""
    tool = subprocess.Popen(
        [sys.executable, "-c", TOOL, str(tmp_path), LAUNCHER],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    log = tmp_path / LOG
    rank = int(wait_for(lambda: log.exists() and log.read_text().strip()))
    launcher = int(open(f"/proc/{rank}/stat").read().rpartition(")")[2].split()[1])
    tool.kill()
    tool.wait()
    wait_for(lambda: not alive(launcher))
    assert alive(rank)
    process.end_strays(tmp_path)
    wait_for(lambda: not alive(rank))


def test_a_kill_of_a_launcher_ends_its_ranks_too(tmp_path):
    """Whatever status it ends with, nothing of the run is alive afterwards."""
    seen = []

    def kill(text):
        if text.strip() and not seen:
            seen.append(int(text))
            parent = open(f"/proc/{seen[0]}/stat").read().rpartition(")")[2].split()[1]
            os.kill(int(parent), signal.SIGKILL)
        return False

    environment = process.environment(tmp_path, "cpu", 1, {})
    end = process.follow([sys.executable, "-c", LAUNCHER], environment, tmp_path, kill)
    assert end.status == -9
    wait_for(lambda: not alive(seen[0]))


def test_another_runs_processes_are_left_alone(tmp_path):
    """Only what carries this run's folder is ended."""
    other = subprocess.Popen(SLEEP, env=process.environment(tmp_path / "ab", "cpu", 1, {}))
    process.end_strays(tmp_path / "a")
    assert other.poll() is None
    process.end_strays(tmp_path / "ab")
    assert other.wait(10) == -9


def judged(tmp_path, log, status, **settings):
    """How a run with this log ended."""
    (tmp_path / LOG).write_text(log)
    it = job(lr=2.0 if settings else 2e-3)
    it = type(it)(it.arm, it.lr, it.seed, tmp_path)
    work = run.Work(it, ["train"], {}, {})
    at = Framework("fairseq", None, fairseq_record)
    end = process.End(status, 1.0, 1.0, 1)
    return run._judge(work, Settings(**settings), at, end, 0).run


def test_a_failure_has_the_trainers_last_words(tmp_path):
    """Failed, at the last update of the log, with the error and not the traceback."""
    log = line(10, 5) + "Traceback (most recent call last):\n  File x\nRuntimeError: no memory\n"
    ended = judged(tmp_path, log, 1)
    assert (ended.status, ended.stopped_at) == (FAILED, 10)
    assert ended.reason == "its trainer ended with exit status 1 and said: RuntimeError: no memory"


@pytest.mark.parametrize(
    ("log", "status"),
    [
        (line(10, 5) + "FloatingPointError: gradients are Nan/Inf\n", 1),
        (line(10, 5) + "[rank0]: RuntimeError: rank 0: NaN in the loss\n", 1),
        (line(10, 5) + line(20, "nan"), None),
    ],
)
def test_a_loss_that_is_no_number_is_a_divergence(tmp_path, log, status):
    """Whether the trainer stopped or was stopped; the update is named and no NaN is kept."""
    ended = judged(tmp_path, log, status)
    assert (ended.status, ended.stopped_at) == (DIVERGED, 20 if status is None else 10)
    assert [point.loss for point in ended.train] == [pytest.approx(5 * 0.6931, abs=1e-3)]


def test_a_ramp_ends_where_the_loss_explodes(tmp_path):
    """Updates survived, and the rate reached there; the slope is the rate over the updates."""
    ended = judged(
        tmp_path, line(10, 5) + line(20, 4) + line(30, 6.1), None, updates=100, ramp=True
    )
    assert (ended.ramp.survived, ended.ramp.exploded) == (20, True)
    assert ended.ramp.rate == pytest.approx(0.4)
    assert run._explosion([Step(1, 1.0, 1.0, 9.0), Step(2, 1.0, 1.0, 5.9)]) is None


class Trainer:
    """A framework whose trainer dies in given ways, each with the checkpoint it leaves."""

    def __init__(self, *ends):
        self.ends, self.updates, self.starts = [*ends], 0, 0

    def follow(self, *given):
        """A process that ended."""
        self.starts += 1
        status, self.updates = self.ends.pop(0)
        (given[2] / LOG).write_text("")
        return process.End(status, 1.0, 1.0, 1)

    def mend(self, folder):
        """Nothing to mend."""

    def done(self, folder):
        """Updates in the checkpoint."""
        return self.updates


@pytest.mark.parametrize(
    ("ends", "starts"),
    [
        ([(0, 300)], 1),
        ([(1, 0)], 1),  # a failure that brought nothing new would come again
        ([(1, 30), (1, 60), (1, 60)], 3),
        ([(-9, 0), (-9, 0), (-15, 0)], 3),  # killed, for memory perhaps: not for ever
        ([(-9, 0), (-9, 30), (-9, 60), (0, 300)], 4),
        ([(-9, 300)], 1),  # fairseq would do one update more
    ],
)
def test_a_trainer_that_dies_is_started_again_while_it_comes_forward(
    ends, starts, tmp_path, monkeypatch
):
    """And a few times after a kill, but not for ever."""
    trainer = Trainer(*ends)
    monkeypatch.setattr(process, "follow", trainer.follow)
    it = type(job())(job().arm, 2e-3, 1, tmp_path)
    quiet = type("Quiet", (), {"say": lambda self, what: None})()
    work, at = run.Work(it, [], {}, {}), Framework("fairseq", None, trainer)
    run._process(work, Settings(), at, quiet)
    assert (trainer.starts, trainer.ends) == (starts, [])
