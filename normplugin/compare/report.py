"""What is written and printed: ``results.json``, ``report.md``, ``report.html`` and the table."""

from __future__ import annotations

import shlex
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normplugin.compare import html
from normplugin.compare import results as record
from normplugin.compare.folder import write_text
from normplugin.compare.results import Arm, Results, Run

MARKDOWN = "report.md"
_FILES = (record.NAME, MARKDOWN, html.NAME)
_HEAD = (
    *("arm", "verdict", "best lr", "loss, nats/token", "change", "bits/byte", "ppl/token"),
    *("ppl/word", "parameters", "to baseline's loss", "speed", "memory"),
)


def write(results: Results, out: Path) -> list[Path]:
    """Write every form of the results, each completely or not at all; return the files.

    Raises:
        CompareError: What the page is made with is not installed; the other files are written.
    """
    record.write(results, out)
    write_text(out / MARKDOWN, _markdown(results))
    write_text(out / html.NAME, html.render(results, out))
    return [out / name for name in _FILES]


def remove(out: Path) -> None:
    """Delete an earlier comparison's report; the runs stay."""
    for name in _FILES:
        (out / name).unlink(missing_ok=True)


def text(results: Results) -> str:
    """Return what is printed: the tables and their cautions."""
    if results.is_ramp:
        parts = [_survived(results.arms), _ramps(results.arms)]
    else:
        parts = [_table(_HEAD, [_row(arm, results.arms[0]) for arm in results.arms])]
        if sum(len(arm.runs) for arm in results.arms) > len(results.arms):
            parts.append(_runs(results.arms))
    parts.append(
        "\n".join(
            [
                *(f"- not comparable: {line}." for line in results.mismatches),
                *(f"- caution: {line}" for line in results.cautions),
            ]
        )
    )
    return "\n\n".join(parts)


def _row(arm: Arm, baseline: Arm) -> list[str]:
    doubt = " ?" if arm.speed_in_doubt or baseline.speed_in_doubt else ""
    loss, base = arm.loss, baseline.loss
    spread = "" if loss is None or loss.std is None else f" ± {loss.std:.4f} (n = {loss.n})"
    change = "" if arm is baseline or not (loss and base) else f"{loss.mean - base.mean:+.4f}"
    delta = arm.parameter_delta
    return [
        arm.name,
        _verdict(arm),
        _number(arm.best_lr, "g"),
        "-" if loss is None else f"{loss.mean:.4f}{spread}",
        change,
        _number(arm.bits_per_byte, ".4f"),
        _number(arm.token_perplexity, ".2f"),
        _number(arm.word_perplexity, ".4g"),
        _number(arm.parameters, ",") + (f" ({delta:+,})" if delta else ""),
        _reached(arm),
        _number(arm.speed_ratio, ".2f", "x") + (doubt if arm.speed_ratio else ""),
        _number(arm.memory_ratio, ".2f", "x"),
    ]


def _verdict(arm: Arm) -> str:
    return arm.verdict if arm.p_value is None else f"{arm.verdict} (p = {arm.p_value:.2g})"


def _reached(arm: Arm) -> str:
    if arm.updates_to_baseline_loss is None:
        return "never" if arm.loss else "-"
    return f"{arm.updates_to_baseline_loss:.0f} updates, {arm.seconds_to_baseline_loss:.0f} s"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _runs(arms: Sequence[Arm]) -> str:
    """Return the sweep: a row per arm and learning rate, a column per seed."""
    seeds = sorted({run.seed for arm in arms for run in arm.runs})
    rows = []
    for arm in arms:
        for lr in dict.fromkeys(run.lr for run in arm.runs):
            said = {run.seed: _ended(run) for run in arm.runs if run.lr == lr}
            best = " *" if lr == arm.best_lr else ""
            rows.append([arm.name, f"{lr:g}{best}", *(said.get(seed, "-") for seed in seeds)])
    return _table(("arm", "lr (* best)", *(f"loss, seed {seed}" for seed in seeds)), rows)


def _ended(run: Run) -> str:
    if run.status != record.FINISHED or not run.valid:
        return f"{run.status} at {run.stopped_at}"
    return f"{run.valid[-1].loss:.4f}"


def _survived(arms: Sequence[Arm]) -> str:
    """Return a row per arm of a ramp: means over its seeds."""
    rows = [
        [
            arm.name,
            _verdict(arm),
            f"{statistics.fmean(it.survived for it in arm.ramps):.0f} (n = {len(arm.ramps)})",
            f"{statistics.fmean(it.rate for it in arm.ramps):.3g}",
        ]
        for arm in arms
        if arm.ramps
    ]
    return _table(("arm", "verdict", "updates survived", "learning rate reached"), rows)


def _ramps(arms: Sequence[Arm]) -> str:
    rows = [
        [arm.name, str(run.seed), str(it.survived), f"{it.rate:.3g}", _fate(it.exploded)]
        for arm in arms
        for run in arm.runs
        if (it := run.ramp)
    ]
    head = ("arm", "seed", "updates survived", "learning rate reached", "then")
    return _table(head, rows)


def _fate(exploded: bool) -> str:
    return "the loss exploded" if exploded else "the run ended"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned Markdown table: first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = [
        "-" * width if place == 0 else "-" * (width - 1) + ":" for place, width in enumerate(widths)
    ]
    return "\n".join(_line(cells, widths) for cells in (head, rule, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return "| " + " | ".join(padded) + " |"


def _markdown(results: Results) -> str:
    parts = [
        f"# {results.title}",
        text(results),
        *([] if results.is_ramp else _equal(results.arms)),
        "## Speed and memory of every run",
        _speeds(results.arms),
        "## What was done",
        "\n".join(f"- {line}" for line in _done(results)),
        *_facts(results.facts),
        "## Commands",
        *(f"```\n{shlex.join(run.command)}\n```" for arm in results.arms for run in arm.runs[:1]),
    ]
    return "\n\n".join(parts) + "\n"


def _facts(facts: Mapping[str, Any]) -> list[str]:
    rows = [[name, str(it)] for name, it in facts.items()]
    return ["## What was found equal in all runs", _table(("fact", "value"), rows)] if rows else []


def _equal(arms: Sequence[Arm]) -> list[str]:
    rows = [
        [arm.name, f"{it.updates:.4f}", f"{it.tokens:.4f}", f"{it.seconds:.4f}"]
        for arm in arms
        if (it := arm.loss_at)
    ]
    table = _table(("arm", "equal updates", "equal tokens", "equal seconds of training"), rows)
    return ["## Losses where every arm has had as much", table]


def _speeds(arms: Sequence[Arm]) -> str:
    rows = [
        [
            *(arm.name, f"{run.lr:g}", str(run.seed), _number(run.step_seconds, ".4f")),
            _number(run.tokens_per_second, ",.0f"),
            " to ".join(f"{speed:,.0f}" for speed in run.quartiles) or "-",
            _number(run.peak_memory_bytes and run.peak_memory_bytes / 2**20, ",.0f", " MiB"),
        ]
        for arm in arms
        for run in arm.runs
    ]
    head = ("arm", "lr", "seed", "s/update", "tokens/s", "its quartiles", "peak memory")
    return _table(head, rows)


def _order(results: Results) -> str:
    if not results.settings.get("diagnostics"):
        known = "the order is not hashed"
    elif results.is_ramp:
        known = "a CRC-32 of all batches between records, as far as every run went"
    else:
        known = "a CRC-32 of all batches between records"
    tokens = "" if results.is_ramp else ", same number of tokens in every log interval"
    return f"data order: same seed, same data{tokens}; {known}"


def _done(results: Results) -> list[str]:
    valid, settings = results.data["valid"], results.settings
    seeds = ", ".join(str(seed) for seed in settings["seeds"])
    rates = ", ".join(f"{rate:g}" for rate in settings["lrs"])
    name = textwrap.shorten(str(results.data["name"]), 200, placeholder=" ...")
    return [
        f"text: {name}; validation on {valid['tokens']:,} tokens (the end of each "
        f"document included), {valid['bytes']:,} bytes",
        f"{settings['updates']:,} updates of {settings['batch']} x {settings['window']} tokens "
        f"per run; seeds {seeds}; learning rates {rates}",
        f"{settings['framework']}'s own trainer, one run after another, on {settings['device']}",
        _order(results),
        "seconds: of training alone; tokens/s: the median of the log intervals after the first "
        "quarter",
        "machine: " + ", ".join(str(it) for it in results.machine.values()),
        "versions: " + ", ".join(f"{name} {it}" for name, it in results.versions.items()),
    ]
