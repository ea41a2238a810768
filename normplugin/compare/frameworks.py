"""What a framework must be able to do; each is a pair of modules, ``*_arms`` and ``*_record``."""

from __future__ import annotations

import hashlib
import importlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import normplugin
from normplugin.compare.plan import Job, Settings
from normplugin.compare.record import Record, Score, Step, Trace
from normplugin.data.encode import SplitCounts
from normplugin.data.manifest import Manifest
from normplugin.errors import CompareError

ROOT = Path(normplugin.__file__).resolve().parent
LOG = "train.log"
DIAGNOSTICS = "diagnostics.jsonl"
# Our models are built from these; an edit of one makes an earlier result of ours another result.
_SOURCES = ("gains", "kernels", "norms", "placement", "presets", "promises", "rebuild")


@dataclass(frozen=True)
class Dataset:
    """A prepared folder, for one framework.

    Attributes:
        folder: As ``normplugin prepare`` wrote it.
        manifest: Its record.
        framework: Name of the subfolder.
    """

    folder: Path
    manifest: Manifest
    framework: str

    @property
    def files(self) -> Path:
        """The framework's own folder."""
        return self.folder.resolve() / self.framework

    @property
    def digest(self) -> str:
        """SHA-256 over the names and contents of the framework's files."""
        prefix = f"{self.framework}/"
        mine = {k: v for k, v in sorted(self.manifest.files.items()) if k.startswith(prefix)}
        if not mine:
            raise CompareError(
                f"--data: got {self.folder}; it holds nothing for {self.framework}. Prepare it "
                f"again with --frameworks {self.framework}."
            )
        return hashlib.sha256("".join(f"{k} {v}\n" for k, v in mine.items()).encode()).hexdigest()

    @property
    def valid(self) -> SplitCounts:
        """Counts of the validation text that is predicted: of the target language, of pairs."""
        languages = self.languages
        name = f"valid.{'-'.join(languages)}.{languages[1]}" if languages else "valid"
        return self.manifest.splits[name]

    @property
    def languages(self) -> list[str] | None:
        """Source and target language of pairs, None for running text."""
        return cast("list[str] | None", self.manifest.settings.get("languages"))


class Arms(Protocol):
    """How the framework trains: its command line, checked before anything starts."""

    def require(self, settings: Settings) -> None:
        """Raise `MissingFrameworkError` or `CompareError` where nothing can be trained."""

    def arguments(self, job: Job, settings: Settings, data: Dataset) -> list[str]:
        """Return the trainer's arguments but for places: they decide a run's result."""

    def command(self, job: Job, settings: Settings, data: Dataset) -> list[str]:
        """Return the command line of a run; the same one begins and goes on."""

    def environment(self, settings: Settings) -> dict[str, str]:
        """Return what is added to a run's environment."""

    def facts(self, job: Job, settings: Settings, data: Dataset) -> dict[str, Any]:
        """Return what a run will be, as far as its arguments say; refuse illegal ones."""

    def versions(self) -> dict[str, str]:
        """Return the versions of the framework and of what it stands on."""


class Records(Protocol):
    """What the framework leaves behind."""

    FIELDS: tuple[str, ...]

    def events(self, log: str) -> list[Step | Score]:
        """Return the training and validation lines of a log, or of a part of it."""

    def read(self, folder: Path, curves: Trace) -> Record:
        """Return the record of a run that ended well; raise `CompareError` if it holds none."""

    def done(self, folder: Path) -> int:
        """Return the updates in the checkpoint that a run goes on from."""

    def mend(self, folder: Path) -> None:
        """Leave only whole checkpoints to a run that was killed."""

    def tidy(self, folder: Path) -> None:
        """Delete all but the last checkpoint of a run that has finished."""


@dataclass(frozen=True)
class Framework:
    """Its name and its two modules."""

    name: str
    arms: Arms
    records: Records


def framework(name: str) -> Framework:
    """Return a framework; nothing of it is imported yet."""
    arms, records = (importlib.import_module(f"{__package__}.{name}_{x}") for x in _MODULES)
    return Framework(name, cast(Arms, arms), cast(Records, records))


_MODULES = ("arms", "record")


def versions() -> dict[str, str]:
    """Return our version and Python's."""
    return {"normplugin": normplugin.__version__, "python": platform.python_version()}


def identity(job: Job, settings: Settings, data: Dataset, at: Framework) -> dict[str, object]:
    """Return what decides a run's result; equal identities share one result."""
    return {
        **by_option(at.arms.arguments(job, settings, data)),
        "threads": settings.threads,
        "environment": at.arms.environment(settings),
        "data": data.digest,
        "versions": at.arms.versions() | versions(),
        "plugin source": None if job.arm.upstream else _source_hash(at.name),
    }


def by_option(argv: Sequence[str]) -> dict[str, list[str]]:
    """Return every option with its values; the last mention of an option wins, as in argparse."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            values = found[name] = [value] if equals else []
        else:
            values.append(word)
    return found


def _source_hash(name: str) -> str:
    digest = hashlib.sha256()
    patterns = (*_SOURCES, f"{name}_plugin/*")
    for path in sorted(path for pattern in patterns for path in ROOT.glob(f"{pattern}.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
