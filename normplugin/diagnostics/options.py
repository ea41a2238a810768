"""The options ``--diagnostics-interval`` and ``--diagnostics-file``, and what can go wrong."""

from __future__ import annotations

from normplugin.errors import NormPluginError


class DiagnosticsError(NormPluginError, RuntimeError):
    """Records that cannot be read or written, or a run that cannot be measured."""


def check_interval(value: object) -> int:
    """Return the interval as a number, or raise `DiagnosticsError`."""
    try:
        interval = int(str(value))
    except ValueError:
        interval = 0
    if interval < 1:
        raise DiagnosticsError(
            f"--diagnostics-interval: got {value!r}; legal are whole numbers from 1 on. Try 100."
        )
    return interval
