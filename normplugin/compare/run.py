"""One arm, one child process: its progress, its peak memory, its result, its failure."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from normplugin.compare import fairseq_record
from normplugin.compare.fairseq_record import LOG, Record
from normplugin.compare.plan import Arm, differences, write_json
from normplugin.errors import CompareError

RESULT = "result.json"
_FORMAT = 1
_POLL_SECONDS = 0.2
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b|\berror: ")


@dataclass(frozen=True)
class Job:
    """What to start for an arm, and what identifies its result."""

    arm: Arm
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    identity: Mapping[str, object]
    updates: int


@dataclass(frozen=True)
class Run:
    """One finished arm.

    Attributes:
        arm: Its name.
        record: What the trainer recorded.
        wall_seconds: Of the whole process, start-up and validation included.
        cpu_seconds: Of the whole process; the machine had other work where they are few.
        peak_memory_bytes: Largest resident set of the process.
    """

    arm: str
    record: Record
    wall_seconds: float
    cpu_seconds: float
    peak_memory_bytes: int


def earlier(job: Job) -> Run | None:
    """Return the arm's finished run, None where there is none.

    Raises:
        CompareError: There is one of other settings.
    """
    path = job.folder / RESULT
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        same = result["format"] == _FORMAT
        identity, run = result["identity"], _run(result["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CompareError(
            f"{path}: got a result that cannot be read ({error}). Pass --force to train it again."
        ) from None
    other = differences(job.identity, identity) if same else ["format"]
    if other:
        raise CompareError(
            f"arm {job.arm.name!r}: got a finished run in {job.folder} with other "
            f"{', '.join(other)}. Name a new --out, or pass --force to train it again."
        )
    return run


def train(job: Job) -> Run:
    """Train an arm from the start and keep its result; Ctrl-C keeps no result."""
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    started = time.monotonic()
    status, cpu, peak = _process(job)
    wall = time.monotonic() - started
    if status:
        raise CompareError(_failure(job, status))
    record = fairseq_record.read(job.folder)
    run = Run(job.arm.name, record, round(wall, 1), round(cpu, 1), peak)
    check_model(job.arm, record)
    result = {"identity": dict(job.identity), "run": dataclasses.asdict(run)}
    write_json(job.folder / RESULT, {"format": _FORMAT, **result, "command": [*job.command]})
    return run


def check_model(arm: Arm, record: Record) -> None:
    """Raise `CompareError` unless the trainer built the model that the arm promises."""
    if record.model != arm.model:
        raise CompareError(
            f"arm {arm.name!r}: got model {record.model}; {arm.model} was to be trained. "
            "Another plugin may have taken the name."
        )
    if arm.upstream == (record.scheme is not None):
        found = record.scheme["name"] if record.scheme else "no norm scheme"
        raise CompareError(
            f"arm {arm.name!r}: got {found} in its log; "
            f"{'none' if arm.upstream else 'its scheme and architecture hash'} must be there. "
            "Check --user-dir."
        )


def _process(job: Job) -> tuple[int, float, int]:
    """Run the child to its end; return its exit status, CPU seconds and peak memory."""
    path = job.folder / LOG
    with path.open("wb") as log, path.open(encoding="utf-8", errors="replace") as reader:
        # In the arm's own folder, so that nothing in the user's shadows a module.
        child = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(job.environment),
            cwd=job.folder,
        )
        try:
            return _follow(child, reader, job)
        finally:
            _stop(child)


def _follow(child: subprocess.Popen[bytes], reader: TextIO, job: Job) -> tuple[int, float, int]:
    # disable=None: no bar where stderr is not a terminal.
    with tqdm(total=job.updates, desc=job.arm.name, unit="update", disable=None) as bar:
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            _show(bar, reader.read(), job.arm.name)
            if pid:
                child.returncode = os.waitstatus_to_exitcode(status)
                cpu = usage.ru_utime + usage.ru_stime
                return child.returncode, cpu, usage.ru_maxrss * _MAXRSS_UNIT
            time.sleep(_POLL_SECONDS)


def _show(bar: tqdm, text: str, name: str) -> None:
    newest = fairseq_record.progress(text)
    if newest is not None:
        bar.set_postfix({"loss (bits)": f"{newest['loss_bits']:.3f}"}, refresh=False)
        bar.update(newest["updates"] - bar.n)
    if 'begin validation on "' in text:
        bar.set_description(f"{name} (validating)")


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.returncode is None:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _failure(job: Job, status: int) -> str:
    log = job.folder / LOG
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").split("\n")]
    told = [line for line in lines if _ERROR.search(line)] or [line for line in lines if line]
    said = "\n  ".join(line[:300] for line in told[-3:]) or "nothing"
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    hint = " It may have been killed for memory." if status == -9 else ""
    return (
        f"arm {job.arm.name!r}: got {how} from its trainer; it must end well.{hint} "
        f"It said:\n  {said}\nRead {log}, and change the arm."
    )


def _run(data: Mapping[str, object]) -> Run:
    fields = dict(data)
    fields["record"] = Record(**fields["record"])  # type: ignore[arg-type]
    return Run(**fields)  # type: ignore[arg-type]
