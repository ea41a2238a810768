"""The output folder: complete or untouched, never half-written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from normplugin.data import manifest
from normplugin.data.manifest import Manifest
from normplugin.errors import DataError


def earlier_result(out: Path) -> Manifest | None:
    """Return the record of what ``out`` holds, None when it is absent or empty.

    Raises:
        DataError: It holds something this command did not write.
    """
    if not out.exists() and not out.is_symlink():
        return None
    if not out.is_dir():
        raise DataError(f"--out: got {out}; it is not a folder. Name a new folder.")
    if not any(out.iterdir()):
        return None
    try:
        return manifest.load(out)
    except DataError:
        raise DataError(
            f"--out: got {out}; it holds something else than prepared data. "
            "Name a new folder; --overwrite replaces prepared data only."
        ) from None


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Give a folder beside ``out`` to write in; put it in the place of ``out`` at the end.

    On any failure, an interrupt included, it is removed and ``out`` is as it was.
    """
    out = out.resolve()
    staging = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
        _put_in_place(staging, out)
    except OSError as error:
        raise DataError(
            f"--out: got {out}; writing it failed ({error}), nothing was "
            "left behind. Free space or choose another folder."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _put_in_place(staging: Path, out: Path) -> None:
    replaced = out.with_name(f".{out.name}.replaced-{os.getpid()}")
    if out.exists():
        out.rename(replaced)
    try:
        staging.rename(out)
    except BaseException:
        if replaced.exists():
            replaced.rename(out)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
