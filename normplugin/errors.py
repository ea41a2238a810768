"""The errors a user can cause, and how they are worded.

Every message reads ``<what>: got <value>; <legal values or the clash>. <What to do.>``
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class NormPluginError(Exception):
    """Base of all errors meant for the user; commands print the message without a traceback."""


class SchemeError(NormPluginError, ValueError):
    """A norm scheme, an option or a mix of them that cannot be built."""


class DataError(NormPluginError, ValueError):
    """Text or a prepared data folder that cannot be used."""


class CheckpointError(NormPluginError, RuntimeError):
    """A checkpoint that does not hold what it, or the model, promises."""


class CompareError(NormPluginError, RuntimeError):
    """Runs that failed, or that may not be ranked against each other."""


class MissingFrameworkError(NormPluginError, ImportError):
    """A framework that is not installed; the message names the pip extra."""


def unknown_value(what: str, value: str, values: Iterable[str], listing: str = "") -> str:
    """Return the message for a value outside a closed set, with the nearest legal one.

    ``listing`` replaces the list of legal values where that would be too long to read.
    """
    legal = {v.lower(): v for v in values}
    near = difflib.get_close_matches(value.lower(), legal, n=1, cutoff=0.5)
    hint = f" Did you mean {legal[near[0]]!r}?" if near else ""
    return f"{what}: got {value!r}; legal are {listing or ', '.join(legal.values())}.{hint}"
