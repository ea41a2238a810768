"""Which frameworks are installed, and importing them when they are needed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from types import ModuleType

from normplugin.data.settings import FRAMEWORKS
from normplugin.errors import MissingFrameworkError

_PROBES = {"fairseq": "fairseq", "megatron": "megatron.core"}


def installed() -> tuple[str, ...]:
    """Return the installed frameworks, without importing them."""
    return tuple(name for name in FRAMEWORKS if _is_installed(name))


def require(names: tuple[str, ...]) -> None:
    """Raise `MissingFrameworkError` unless there is a framework, and all named are installed."""
    if not names:
        raise MissingFrameworkError(
            "prepare: got no framework; neither fairseq nor Megatron-Core is installed. "
            "Install normplugin[fairseq] or normplugin[megatron]."
        )
    for name in names:
        if not _is_installed(name):
            raise _missing(name, "it is not installed")


def imported(framework: str, module: str) -> ModuleType:
    """Import a framework's module, without what it prints about its own optional extras."""
    level = logging.root.manager.disable
    logging.disable(max(level, logging.INFO))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except Exception as error:  # fairseq 0.12.2 raises ValueError on Python 3.11 and later
        raise _missing(framework, f"importing {module} failed ({error})") from error
    finally:
        logging.disable(level)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(_PROBES[name]) is not None
    except ModuleNotFoundError:
        return False


def _missing(name: str, why: str) -> MissingFrameworkError:
    return MissingFrameworkError(
        f"--frameworks: got {name}; {why}. Install normplugin[{name}], or leave {name} out."
    )
