"""The default corpus: the running Python's standard-library sources, about 11 MB.

It is on every machine that can run this package, needs no download and is the same on every run
of one Python version. Installed packages and the library's own tests are left out. The split is
by file: about one in twenty is validation, chosen by a hash of its path, so no file has text in
both and another Python version moves few files.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from pathlib import Path

from normplugin.data.corpus import Corpus, Source
from normplugin.errors import DataError

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})
_LEFT_OUT_SUFFIX = "_test"
_VALID_ONE_IN = 20


def default_corpus(document: str, root: Path | None = None) -> Corpus:
    """Return the corpus; ``root`` is the library's folder, by default the running Python's."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    sources = tuple(
        Source(name, root / name, split_of(name)) for name in names if _belongs(name, root / name)
    )
    if {source.split for source in sources} != {"train", "valid"}:
        raise DataError(
            f"default corpus: got {len(sources)} sources in the standard library; this Python "
            "was installed without them. Name text files as INPUT."
        )
    version = platform.python_version()
    return Corpus(f"Python {version} standard library", sources, document, 1 / _VALID_ONE_IN)


def split_of(name: str) -> str:
    """Return the split of a file by its path relative to the library."""
    digest = hashlib.sha256(name.encode()).digest()
    return "valid" if int.from_bytes(digest[:4], "big") % _VALID_ONE_IN == 0 else "train"


def _belongs(name: str, path: Path) -> bool:
    folders = name.split("/")[:-1]
    if any(folder in _LEFT_OUT or folder.endswith(_LEFT_OUT_SUFFIX) for folder in folders):
        return False
    if not path.is_file():
        return False
    try:
        return bool(path.read_bytes().decode("utf-8").strip())
    except UnicodeDecodeError:
        return False
