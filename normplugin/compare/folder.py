"""The output folder: one comparison in it, one tool at a time, files written whole."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from normplugin.errors import CompareError

PLAN = "plan.json"
_KIND = "normplugin compare"
_FORMAT = 2


@contextmanager
def workspace(out: Path) -> Iterator[None]:
    """Take the output folder for one comparison at a time.

    Raises:
        CompareError: It holds something else, or another comparison is at work in it.
    """
    check_out(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / "lock").open("a") as file:
            _lock(file.fileno(), out)
            yield
    except OSError as error:
        raise CompareError(
            f"--out: got {out}; writing in it failed ({error}). Free space or choose another folder"
            "; the same command goes on where this one stopped."
        ) from error


def check_out(out: Path) -> None:
    """Raise `CompareError` unless the folder is new, empty or an earlier comparison's."""
    if os.pathsep in str(out.resolve()):
        raise CompareError(
            f"--out: got {out}; fairseq cuts a path at {os.pathsep!r}. Name a folder without it."
        )
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or ({it.name for it in out.iterdir()} - {"lock"} and _plan(out) is None):
        raise CompareError(
            f"--out: got {out}; it holds something else than a comparison. Name a new folder."
        )


def claim(out: Path, plan: Mapping[str, object], replace: bool) -> None:
    """Record what is compared here; more arms, rates and seeds may join later.

    Args:
        out: The folder, taken.
        plan: Option -> value of what all runs share.
        replace: Whether another plan may take the place of an earlier one.

    Raises:
        CompareError: An earlier comparison in it shares something else.
    """
    earlier = _plan(out)
    if earlier and not replace:
        other = differences(plan, earlier)
        if other:
            raise CompareError(
                f"--out: got {out}, where a comparison with other {', '.join(other)} is kept. "
                "Name a new folder, or pass --force to train everything again."
            )
    write_json(out / PLAN, {"kind": _KIND, "format": _FORMAT, "plan": dict(plan)})


def begin(out: Path) -> None:
    """Mark a new folder as a comparison's, before anything else is written in it."""
    if not (out / PLAN).exists():
        write_json(out / PLAN, {"kind": _KIND, "format": _FORMAT, "plan": None})


def differences(ours: Mapping[str, object], earlier: Mapping[str, object]) -> list[str]:
    """Return the names whose values differ; tuples equal lists, as in JSON."""
    keys = sorted(set(ours) | set(earlier))
    return [key for key in keys if _plain(ours.get(key)) != _plain(earlier.get(key))]


def write_json(path: Path, data: object) -> None:
    """Write a file completely or not at all."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _lock(descriptor: int, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise CompareError(
            f"--out: got {out}; another comparison is at work in it. Wait, or name another."
        ) from None


def _plan(out: Path) -> dict[str, object] | None:
    """Return the earlier plan, empty where it was not yet made; None for something else."""
    try:
        data = json.loads((out / PLAN).read_text(encoding="utf-8"))
        if (data["kind"], data["format"]) == (_KIND, _FORMAT):
            return data["plan"] or {}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _plain(value: object) -> object:
    return json.loads(json.dumps(value))
