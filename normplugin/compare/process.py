"""A trainer's process: started, followed, ended with all its children, and no orphan left behind.

A trainer is told of the end of this tool by the kernel (Linux), and every process of a run carries
the run's folder in its environment, by which what survived a ``kill -9`` is found and ended before
anything else writes to that folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from normplugin.compare.frameworks import LOG, ROOT

_MARK = "NORMPLUGIN_COMPARE_RUN"
_POLL_SECONDS = 0.2
_PATIENCE = 10.0  # seconds from SIGTERM to SIGKILL
_PR_SET_PDEATHSIG = 1
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
# A launcher around us must not make a framework think that it launched the trainer too.
_LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class End:
    """How a process ended: exit status, negative for a signal; None where we stopped it."""

    status: int | None
    wall_seconds: float
    cpu_seconds: float
    peak_memory_bytes: int


def environment(folder: Path, device: str, threads: int, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a run in a folder."""
    kept = {key: value for key, value in os.environ.items() if key not in _LAUNCHER}
    for name in ("OMP", "MKL", "OPENBLAS"):
        kept[f"{name}_NUM_THREADS"] = str(threads)
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT.parent), kept.get("PYTHONPATH")]))
    if device == "cpu":
        kept["CUDA_VISIBLE_DEVICES"] = ""
    return {**kept, "PYTHONUNBUFFERED": "1", _MARK: str(folder), **more}


def follow(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    enough: Callable[[str], bool],
) -> End:
    """Run a trainer to its end; its output is appended to the log.

    Args:
        command: Its command line.
        environment: See `environment`.
        folder: Of the run; the trainer works in it, so that nothing of the user's is imported.
        enough: Given every new piece of whole log lines; True stops the trainer.
    """
    started = time.monotonic()
    path = folder / LOG
    with path.open("ab") as log, path.open(encoding="utf-8", errors="replace") as reader:
        reader.seek(0, os.SEEK_END)
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
            preexec_fn=_die_with_parent(os.getpid()),
        )
        try:
            rest = ""
            while True:
                pid, status, usage = os.wait4(child.pid, os.WNOHANG)
                text = rest + reader.read()
                whole, newline, rest = text.rpartition("\n")
                stop = enough(whole + newline)
                if pid or stop:
                    break
                time.sleep(_POLL_SECONDS)
            if pid:
                child.returncode = os.waitstatus_to_exitcode(status)
        finally:
            _stop(child)
            end_strays(folder)
    cpu = usage.ru_utime + usage.ru_stime
    wall = time.monotonic() - started
    return End(child.returncode if pid else None, wall, cpu, usage.ru_maxrss * _MAXRSS_UNIT)


def end_strays(folder: Path) -> None:
    """Kill what is left of a run: ranks whose launcher was killed, a trainer without its tool."""
    mark = f"{_MARK}={folder}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
                _await_end(path)


def _await_end(environ: Path) -> None:
    """A killed process may still write for a moment; its environment is gone when it is."""
    for _ in range(100):
        if not environ.exists() or not environ.read_bytes():
            return
        time.sleep(0.05)


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """Return what a child does before its program starts; None where the kernel cannot help."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # loaded here: a forked child must not import anything

    def run() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return run


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.returncode is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_PATIENCE)
            return
