"""The layer spec of the scheme that this run's options choose: what our launcher gives ``--spec``.

Megatron imports a spec by name and before its config exists; the scheme is read when a layer is
built, once Megatron's own options are known. It is then put into Megatron's arguments, which
Megatron saves in every checkpoint; resume.py compares them when a run is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

try:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.training import get_args
except ImportError as error:
    # Megatron logs an ImportError of a spec module and goes on with no spec at all.
    raise RuntimeError(
        f"megatron.training: it cannot be imported ({error}). "
        "Install it: pip install 'normplugin[megatron]' on Python 3.12."
    ) from error

from normplugin.errors import SchemeError
from normplugin.megatron_plugin.arguments import NAMES, WARM_START, scheme_from_args
from normplugin.megatron_plugin.layers import SchemeLayer
from normplugin.megatron_plugin.resume import saved_arguments
from normplugin.placement import NormScheme

_options: dict[str, Any] = {}


def choose(options: Mapping[str, Any]) -> None:
    """Set the options of this process for a script whose parser does not know them."""
    _options.update({name: options[name] for name in (*NAMES, WARM_START)})


def scheme() -> NormScheme:
    """Return the scheme of this run.

    Raises:
        SchemeError: For an illegal mix, and if no scheme was chosen.
    """
    args = get_args()
    vars(args).update(_options)
    if not getattr(args, "norm_scheme", None):
        _adopt_saved(args)
    return scheme_from_args(args)


def _adopt_saved(args: Any) -> None:
    """Take the options of the checkpoint: ``--use-checkpoint-args`` took its ``--spec``."""
    saved = saved_arguments(args)
    if not getattr(saved, "norm_scheme", None):
        raise SchemeError(
            "--norm-scheme: got none; the spec 'chosen' is the launcher's and needs one. "
            "Add --norm-scheme NAME, or take a constant of normplugin.megatron_plugin.specs."
        )
    vars(args).update({name: getattr(saved, name, None) for name in NAMES})


chosen = ModuleSpec(module=SchemeLayer, params={"scheme": scheme})
