"""What is to be trained: arms, the settings they share, and the folder they are kept in."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from normplugin.errors import CompareError

DEVICES = ("cpu", "cuda")
BASELINE = "transformer_lm_gpt"
ARMS = ("normformer_tiny", "periln_tiny")
PLAN = "plan.json"
_KIND = "normplugin compare"
_RESERVED = frozenset({"data"})


@dataclass(frozen=True)
class Settings:
    """What every arm shares.

    Attributes:
        updates: Optimizer steps; the learning rate has decayed to zero after the last.
        seed: Of the initial weights and of the data order.
        lr: Peak learning rate.
        device: One of `DEVICES`.
        threads: CPU threads of a trainer.
    """

    updates: int = 300
    seed: int = 1
    lr: float = 2e-3
    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        _require("--updates", self.updates, self.updates >= 2, "an integer >= 2")
        _require("--seed", self.seed, self.seed >= 1, "an integer >= 1")
        _require("--lr", self.lr, 0.0 < self.lr < 1.0, "0 < value < 1")
        _require("--threads", self.threads, self.threads >= 1, "an integer >= 1")


@dataclass(frozen=True)
class Arm:
    """One model to train.

    Attributes:
        name: As the user typed it.
        arch: Architecture, ours or upstream's.
        options: Further options of the trainer, for this arm only.
        upstream: Whether the framework's own model is meant, not ours.
        model: Class the trainer must report.
    """

    name: str
    arch: str
    options: tuple[str, ...]
    upstream: bool
    model: str

    @property
    def folder(self) -> str:
        """Name of the arm's folder."""
        return folder_name(self.name)


def folder_name(arm: str) -> str:
    """Return an arm's name as a folder name."""
    return re.sub(r"[^\w.+=-]+", "_", arm.replace(" --", "_")).strip("_.")[:120]


def split_arms(names: Sequence[str], baseline: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return (name, architecture, options) of every arm, the baseline first.

    Raises:
        CompareError: An arm that has no architecture, or is given twice.
    """
    names = [" ".join(name.split()) for name in names]
    baseline = " ".join(baseline.split())
    ordered = [baseline, *(name for name in names if name != baseline)]
    folders = [folder_name(name).lower() for name in ordered]
    for name, folder in zip(ordered, folders, strict=True):
        if folders.count(folder) > 1 or names.count(name) > 1:
            raise CompareError(f"--arms: got {name!r} twice; legal is once. Drop one of the two.")
        if folder in _RESERVED or not re.match(r"\w", name):
            raise CompareError(
                f"--arms: got {name!r}; legal is ARCH or 'ARCH --option value'. Begin with the "
                "architecture, and quote an arm that has options."
            )
    return [_split(name) for name in ordered]


def _split(name: str) -> tuple[str, str, tuple[str, ...]]:
    try:
        arch, *options = shlex.split(name)
    except ValueError as error:
        raise CompareError(f"--arms: got {name!r}; {error}. Close the quote.") from None
    return name, arch, tuple(options)


def differences(ours: Mapping[str, object], earlier: Mapping[str, object]) -> list[str]:
    """Return the names whose values differ."""
    keys = sorted(set(ours) | set(earlier))
    return [key for key in keys if _plain(ours.get(key)) != _plain(earlier.get(key))]


def _plain(value: object) -> object:
    return json.loads(json.dumps(value))


@contextmanager
def workspace(out: Path) -> Iterator[None]:
    """Take the output folder for one comparison at a time.

    Raises:
        CompareError: It holds something else, or another comparison is at work in it.
    """
    check_out(out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / PLAN).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CompareError(
                f"--out: got {out}; another comparison is at work in it. Wait, or name another."
            ) from None
        if not (out / PLAN).stat().st_size:
            json.dump({"kind": _KIND, "format": 1}, file)
            file.flush()
        yield


def check_out(out: Path) -> None:
    """Raise `CompareError` unless the folder is new, empty or an earlier comparison's."""
    if os.pathsep in str(out.resolve()):
        raise CompareError(
            f"--out: got {out}; fairseq cuts a path at {os.pathsep!r}. Name a folder without it."
        )
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or (any(out.iterdir()) and not _is_ours(out / PLAN)):
        raise CompareError(
            f"--out: got {out}; it holds something else than a comparison. Name a new folder."
        )


def _is_ours(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8")
        return not text or json.loads(text).get("kind") == _KIND
    except (OSError, ValueError, AttributeError):
        return False


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


def _require(what: str, value: object, legal: bool, legal_values: str) -> None:
    if not legal:
        raise CompareError(f"{what}: got {value}; legal is {legal_values}. Change it.")
