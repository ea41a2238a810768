"""May runs be ranked: equal in all that is not their arm, or refused by name.

Runs of one seed are compared with one another: they must have had the same batches. The learning
rate is chosen per arm; everything else that a record calls a fact must be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normplugin.compare.plan import Job, Settings
from normplugin.errors import CompareError, unknown_value

_CHOSEN = "learning rate"
_PARTLY_KNOWN = "batches"


@dataclass(frozen=True)
class Finding:
    """A fact that differs, and the sentence about it."""

    fact: str
    text: str


def compare(runs: Sequence[tuple[Job, Mapping[str, Any]]]) -> list[Finding]:
    """Return what differs between runs and the first run of the same seed."""
    found: dict[Finding, None] = {}
    first: dict[int, tuple[Job, Mapping[str, Any]]] = {}
    for job, facts in runs:
        reference, expected = first.setdefault(job.seed, (job, facts))
        if facts.get("seed") is not None and int(facts["seed"]) != job.seed:
            text = f"got {facts['seed']} for {job.name!r}; {job.seed} was asked for"
            found[Finding("seed", f"seed: {text}")] = None
        for fact in dict.fromkeys((*expected, *facts)):
            ours, theirs = facts.get(fact), expected.get(fact)
            if fact not in (_CHOSEN, "seed") and _differ(fact, ours, theirs):
                found[Finding(fact, _sentence(fact, job, reference, ours, theirs))] = None
    return list(found)


def refuse(found: Iterable[Finding], allowed: Sequence[str]) -> list[str]:
    """Return what was found and allowed; raise `CompareError` for the rest."""
    allowed = [_plain(name) for name in allowed]
    rest = [finding for finding in found if _plain(finding.fact) not in allowed]
    if rest:
        more = f" ({len(rest) - 1} more)" if len(rest) > 1 else ""
        raise CompareError(
            f"{rest[0].text}{more}. Runs are ranked only when these are equal: change the arm, or "
            f"pass --allow-mismatch {_option(rest[0].fact)} to be warned only."
        )
    return [finding.text for finding in found]


def check_fields(names: Iterable[str], legal: Iterable[str]) -> None:
    """Raise `CompareError` for a name that is no fact."""
    known = [_option(name) for name in legal]
    for name in names:
        if _plain(name) not in map(_plain, known):
            raise CompareError(unknown_value("--allow-mismatch", name, known))


def check_parameters(job: Job, settings: Settings, got: int, baseline: int) -> Finding | None:
    """Return a finding where an arm's parameters are not the baseline's and the scheme's."""
    promised = settings.promised_parameters(job.arm)
    if got - baseline == promised:
        return None
    text = (
        f"parameters: got {got - baseline:+,} for {job.arm.name!r} against the baseline; its "
        f"scheme adds {promised:+,}"
    )
    return Finding("parameters", text)


def _sentence(fact: str, job: Job, reference: Job, ours: Any, theirs: Any) -> str:
    where = ""
    if isinstance(ours, list) and isinstance(theirs, list) and _are_lines((*ours, *theirs)):
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if _differ(fact, [a], [b])]
        if pairs:
            (at, ours), (other, theirs) = pairs[0]
            where = f", first at update {min(at, other):g}"
        else:
            ours, theirs = (f"{len(lines)} log lines" for lines in (ours, theirs))
    return f"{fact}: got {ours} for {job.name!r}; {theirs} for {reference.name!r}{where}"


def _differ(fact: str, ours: Any, theirs: Any) -> bool:
    """Whether facts differ; of batches, a number that one run does not know (None) may be any."""
    if fact != _PARTLY_KNOWN or not (isinstance(ours, list) and isinstance(theirs, list)):
        return bool(ours != theirs)
    return len(ours) != len(theirs) or any(map(_lines_differ, ours, theirs))


def _lines_differ(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    (update, value), (other, expected) = ours, theirs
    return update != other or (value != expected and None not in (value, expected))


def _are_lines(values: Sequence[Any]) -> bool:
    return all(isinstance(value, list) for value in values)


def _option(fact: str) -> str:
    return fact.lower().replace(" ", "-")


def _plain(name: str) -> str:
    return name.lower().replace("-", " ").replace("_", " ")
