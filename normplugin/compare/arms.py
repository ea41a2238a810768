"""The vocabulary of ``--arms``: ``upstream``, a scheme, and options on top of either.

upstream   normformer   normformer+residual-scale   periln+norm-type=rmsnorm   A+C
upstream+dropout=0.1    (what is no option of a scheme goes to the trainer, for this arm only)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from normplugin.errors import CompareError, SchemeError, unknown_value
from normplugin.placement import SCHEMES, NormScheme, canonical_name, resolve_scheme

UPSTREAM = "upstream"
_VALUES = ("norm-type", "norm-eps", "head-scale", "qk-norm", "output-norm-init")
_FLAGS = ("norm-zero-centered", "residual-scale", "embedding-norm", "recompute-ffn-norm")
_OPTIONS = (*_VALUES, *_FLAGS)
_APART = re.compile(r"[,\s]+(?![^()]*\))")  # not inside (0.9, 0.98)
_PLUS = re.compile(r"\+(?=[A-Za-z])")  # not inside 1e+3


@dataclass(frozen=True)
class Arm:
    """One model to train.

    Attributes:
        name: As the user typed it.
        placement: Its norm scheme; None for the framework's own model.
        options: Words of its command line, for this arm only.
    """

    name: str
    placement: NormScheme | None
    options: tuple[str, ...]

    @property
    def upstream(self) -> bool:
        """Whether the framework's own model is meant, not ours."""
        return self.placement is None

    @property
    def folder(self) -> str:
        """Name of the arm's folder."""
        return re.sub(r"[^\w.+=-]+", "_", self.name).strip("_.")[:120]


def parse(words: Sequence[str]) -> list[Arm]:
    """Return the arms, the baseline first.

    Raises:
        CompareError: An unknown scheme or option, or an arm that is given twice.
    """
    names = [name for name in _APART.split(" ".join(words)) if name]
    arms = [_arm(name) for name in names]
    if UPSTREAM not in names:
        arms.append(_arm(UPSTREAM))
    arms.sort(key=lambda arm: arm.name != UPSTREAM)
    folders = [arm.folder.lower() for arm in arms]
    for arm, folder in zip(arms, folders, strict=True):
        if folders.count(folder) > 1:
            raise CompareError(
                f"--arms: got {arm.name!r} twice; legal is once. Drop one of the two."
            )
    return arms


def _arm(name: str) -> Arm:
    head, *rest = _PLUS.split(name)
    while rest and set((head + rest[0]).upper()) <= set("ABC+"):
        head += f"+{rest.pop(0)}"
    pairs = [option.partition("=") for option in rest]
    words = [w for key, equals, value in pairs for w in (f"--{key}", *([value] * bool(equals)))]
    if head == UPSTREAM:
        _check_trainer_options(name, [key for key, _, _ in pairs], upstream=True)
        return Arm(name, None, tuple(words))
    ours = {key: value for key, _, value in pairs if key in _OPTIONS}
    _check_trainer_options(name, [key for key, _, _ in pairs if key not in ours], upstream=False)
    return Arm(name, _placement(name, head, ours), tuple(words))


def _placement(name: str, head: str, given: dict[str, str]) -> NormScheme:
    try:
        scheme = canonical_name(head)
    except SchemeError:
        message = unknown_value("--arms", head, [UPSTREAM, *SCHEMES])
        raise CompareError(f"{message} Each may have options: SCHEME+residual-scale.") from None
    keywords = {key.replace("-", "_"): value or None for key, value in given.items()}
    for key in _FLAGS:
        if keywords.pop(key.replace("-", "_"), None):
            raise CompareError(f"--arms: got {name!r}; {key} takes no value. Write +{key}.")
    flags = {k.replace("-", "_"): True for k in _FLAGS[:3] if k in given}
    missing = [key for key in _VALUES if key in given and not given[key]]
    if missing:
        raise CompareError(f"--arms: got {name!r} without a value. Write +{missing[0]}=VALUE.")
    try:
        return resolve_scheme(scheme, **keywords, **flags)  # type: ignore[arg-type]
    except SchemeError as error:
        raise CompareError(f"--arms: got {name!r}; {error}") from None


def _check_trainer_options(name: str, keys: Sequence[str], upstream: bool) -> None:
    """Refuse what can only be a slip: an option of schemes for upstream, or nearly one."""
    for key in keys:
        if upstream and key in (*_OPTIONS, "norm-scheme"):
            raise CompareError(
                f"--arms: got {name!r}; {key} changes a scheme, and upstream's model has none. "
                f"Write preln+{key} for the same model with it."
            )
        near = difflib.get_close_matches(key, _OPTIONS, n=1, cutoff=0.8)
        if near or not re.fullmatch(r"[a-z][\w-]*", key):
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise CompareError(
                f"--arms: got option {key!r} in {name!r}; legal are {', '.join(_OPTIONS)}, and "
                f"options of the trainer.{hint} Change it."
            )
