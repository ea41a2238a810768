"""The verdict, the arms and the quantities in plain sentences, for who has not read the papers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from normplugin.compare import arms as vocabulary
from normplugin.compare.results import Arm, Results
from normplugin.errors import NormPluginError

_LEADS = {
    "better": "Better than {}",
    "worse": "Worse than {}",
    "no difference shown": "No difference to {} shown",
    "one seed": "One seed, so no verdict against {}",
    "not tested": "Not tested against {}",
    "failed": "Failed, so not ranked against {}",
}
_SITES = {
    "input": "norm before it",
    "output": "norm after it (before the add)",
    "residual": "norm after the add",
    "hidden": "norm inside (after the activation)",
    "query": "norm on queries",
    "key": "norm on keys",
    "head_scale": "learned scale per head",
    "residual_scale": "learned scale on the skip path",
    "embedding": "norm on the embeddings",
    "final": "norm at the end",
}
_SUBLAYERS = {"attention": "attention", "ffn": "FFN", "stack": "whole stack"}
GLOSSARY = {
    "validation loss": "How surprised the model is by text it was not trained on, in nats per "
    "token (natural logarithm). Lower is better.",
    "perplexity": "The same as a number of choices: exp(loss). A perplexity of 20 is a model as "
    "unsure as one that guesses among 20 equally likely tokens.",
    "bits per byte": "The same per byte of the raw text: comparable between vocabularies.",
    "update": "One step of the optimizer on one batch.",
    "speed, memory": "Tokens per second and peak memory over the baseline's: 1.02x is 2 % more. "
    "Start-up, validation, checkpoints and the first quarter of a run are left out of the speed.",
    "to baseline's loss": "After how many updates, and how much training time, the arm's "
    "validation loss came down to the baseline's final one.",
    "±": "Sample standard deviation over n seeds.",
    "p": "How often chance alone would show a difference this large between equal arms "
    "(Welch's t-test); below 0.05 it is called a difference.",
}


def lead(results: Results) -> str:
    """Return the verdict on all arms in one line."""
    if results.arms[0].verdict == "failed":
        return f"The baseline {results.baseline} did not finish, so nothing can be ranked."
    differ = "The runs differ in what stands below, so this is no fair ranking."
    said = [differ] * bool(results.mismatches)
    for verdict, words in _LEADS.items():
        names = [_changed(arm, results) for arm in results.arms[1:] if arm.verdict == verdict]
        if names:
            said.append(f"{words.format(results.baseline)}: {_and(names)}.")
    return " ".join(said) or "Only the baseline was trained."


def sentence(arm: Arm, results: Results) -> str:
    """Return one arm's outcome with its numbers, how sure it is, and what it costs."""
    base = results.arms[0]
    if arm.ramps:
        return _survived(arm, base)
    if arm.loss is None:
        return f"no learning rate at which every seed finished{_why(arm)}."
    if base.loss is None:
        return f"validation loss {arm.loss.mean:.4f} nats per token; no baseline to compare with."
    change = arm.loss.mean - base.loss.mean
    said = (
        f"validation loss {arm.loss.mean:.4f} against {base.loss.mean:.4f} nats per token "
        f"({change:+.4f}, {change / base.loss.mean:+.1%}); {_sure(arm, base)}."
    )
    return " ".join([said, _reached(arm, base), _cost(arm, base)]).strip()


def placement(arm: Arm) -> str:
    """Return where an arm's norms and scales sit."""
    try:
        scheme = vocabulary.parse([arm.name])[-1].placement if arm.scheme else None
    except NormPluginError:  # written by another version
        scheme = None
    if scheme is None:
        return arm.scheme or "the framework's own model, untouched"
    sites = [*scheme.layer_sites(), *scheme.stack_sites()]
    return "; ".join(
        f"{name}: {', '.join(_SITES.get(site.role, site.role) for site in mine)}"
        for sublayer, name in _SUBLAYERS.items()
        if (mine := [site for site in sites if site.sublayer == sublayer])
    )


def _changed(arm: Arm, results: Results) -> str:
    base = results.arms[0]
    if arm.ramps or not (arm.loss and base.loss):
        return arm.name
    return f"{arm.name} ({arm.loss.mean / base.loss.mean - 1.0:+.1%} loss)"


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _why(arm: Arm) -> str:
    ended = next((run for run in arm.runs if run.stopped_at is not None), None)
    if ended is None:
        return ""
    reason = (ended.reason or "no reason known").rstrip(".")
    return f" ({ended.status} at update {ended.stopped_at}: {reason})"


def _sure(arm: Arm, base: Arm) -> str:
    assert arm.loss and base.loss
    same = arm.loss.n == base.loss.n
    seeds = f"{arm.loss.n} seeds each" if same else f"{arm.loss.n} and {base.loss.n} seeds"
    if arm.loss.n == 1 or base.loss.n == 1:
        return "one seed, so this may be chance"
    p = "" if arm.p_value is None else f"p = {arm.p_value:.2g}, "
    if arm.verdict in ("better", "worse"):
        return f"hardly chance ({p}{seeds})"
    if arm.verdict == "no difference shown":
        return f"this may be chance ({p}{seeds})"
    return f"not tested ({seeds})"


def _reached(arm: Arm, base: Arm) -> str:
    ends = [run.valid[-1].update for run in base.at_best() if run.valid]
    if arm.updates_to_baseline_loss is None or not ends:
        return f"It never came down to {base.name}'s final loss."
    return (
        f"It reached {base.name}'s final loss after {arm.updates_to_baseline_loss:,.0f} of "
        f"{ends[0]:,} updates."
    )


def _cost(arm: Arm, base: Arm) -> str:
    doubt = " (on a busy machine: unsure)" if arm.speed_in_doubt or base.speed_in_doubt else ""
    said = []
    if arm.speed_ratio is not None:
        said.append(f"{arm.speed_ratio:.2f}x {base.name}'s tokens per second{doubt}")
    if arm.memory_ratio is not None:
        said.append(f"{arm.memory_ratio:.2f}x its peak memory")
    return f"It had {_and(said)}." if said else ""


def _survived(arm: Arm, base: Arm) -> str:
    ours, theirs = arm.ramps, base.ramps
    said = (
        f"survived {statistics.fmean(it.survived for it in ours):,.0f} updates of a growing "
        f"learning rate, up to {statistics.fmean(it.rate for it in ours):.3g}"
    )
    if theirs:
        said += f"; {base.name} {statistics.fmean(it.survived for it in theirs):,.0f}"
    few = min(len(ours), len(theirs)) < 2
    p = "" if arm.p_value is None else f", p = {arm.p_value:.2g}"
    return f"{said} ({'one seed, so this may be chance' if few else f'{len(ours)} seeds{p}'})."
