"""Train norm schemes against the framework's own model, on the same data, and compare.

An arm is a scheme, with options on top; "upstream", the framework's own Pre-LN model, is always
the baseline. Every run (arm x learning rate x seed) is the framework's own trainer in a process of
its own:

    normplugin compare --out DIR --arms normformer,normformer+residual-scale,periln,A+C
    normplugin compare --out DIR --lr 1e-3,3e-3 --seeds 1,2,3 --arms periln+norm-type=rmsnorm
    normplugin compare --out DIR --arms normformer -- --weight-decay 0.01

Words after -- go to every trainer; +option=value after an arm that no scheme has, to its trainer.
Without --data the text is the running Python's standard library. Writes DIR/results.json,
DIR/report.md, DIR/report.html and, per run, its log, last checkpoint and result. The same command
again goes on where it stopped, and may add arms, learning rates and seeds; a failed run gets
another chance.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normplugin.compare import arms as vocabulary
from normplugin.compare import collect, fair, folder, plan, process, report, summary
from normplugin.compare.collect import Entry
from normplugin.compare.frameworks import Dataset, Framework, framework, identity
from normplugin.compare.plan import Job, Settings
from normplugin.compare.progress import Progress
from normplugin.compare.run import Work, earlier, forget, train
from normplugin.data import command as prepare_command
from normplugin.data import manifest
from normplugin.data.prepare import prepare
from normplugin.errors import CompareError

_MAX_THREADS = 8  # more do not help a model of this size
_DEFAULTS = Settings()
_ARMS = "normformer,periln"
_RECORDS = 20  # of the diagnostics, along a run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``normplugin compare``."""
    add, default = parser.add_argument, _DEFAULTS
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    add("--framework", choices=plan.FRAMEWORKS, default=default.framework, help="default: fairseq")
    add("--arms", nargs="+", default=[_ARMS], metavar="ARM", help=f"default: {_ARMS}")
    add("--kind", choices=tuple(plan.KINDS), default=default.kind, help="of model; default: lm")
    add("--size", default=default.size, help=f"{', '.join(plan.sizes('lm'))}, or {plan.FREE}")
    add("--data", default="default", metavar="DIR", help="folder of 'normplugin prepare'")
    _add_budget(parser)
    _add_machine(parser)
    add("--force", action="store_true", help="train everything again, finished or not")
    add(
        "--allow-mismatch",
        action="append",
        default=[],
        metavar="FIELD",
        help="warn, instead of refusing, when runs differ in this (repeatable)",
    )
    add("extra", nargs="*", metavar="-- OPTION", help="further words for every trainer")


def _add_budget(parser: argparse.ArgumentParser) -> None:
    add, default = parser.add_argument, _DEFAULTS
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--updates", type=int, metavar="N", help=f"default: {default.updates}")
    budget.add_argument("--tokens", type=int, metavar="N", help="instead of --updates")
    rates = f"one, or several to take each arm's best of (default: {default.lrs[0]:g})"
    add("--lr", nargs="+", default=["2e-3"], metavar="RATE", help=rates)
    add(
        "--seeds", nargs="+", default=["1"], metavar="N", help="default: 1; a verdict needs several"
    )
    ramp = "let the rate grow from 0 to MAX, reached at the last update, until the loss explodes"
    add("--lr-ramp", type=float, metavar="MAX", help=ramp)
    add("--window", type=int, default=default.window, metavar="N", help="tokens per sequence (128)")
    add("--batch", type=int, default=default.batch, metavar="N", help="sequences per update (16)")
    scored = "scorings of the validation text along a run (10); fewer are faster"
    add("--validations", type=int, default=default.validations, metavar="N", help=scored)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=plan.DEVICES, default="cpu", help="default: cpu")
    add("--threads", type=int, metavar="N", help="CPU threads (default: the CPUs, at most 8)")
    add("--nproc", type=int, metavar="N", help="processes of a run (default: tp x pp)")
    add("--tp", type=int, default=1, metavar="N", help="tensor-parallel processes (megatron)")
    add("--pp", type=int, default=1, metavar="N", help="pipeline stages (megatron)")
    records = (
        f"updates between two records of the diagnostics; 0: none (default: {_RECORDS} records)"
    )
    add("--diagnostics-interval", type=int, metavar="N", help=records)


def run(args: argparse.Namespace) -> int:
    """Check, prepare, train and report; 1 if no arm but the baseline could be ranked."""
    settings = _settings(args)
    at = framework(settings.framework)
    chosen = vocabulary.parse(args.arms)
    fair.check_fields(args.allow_mismatch, (*at.records.FIELDS, "parameters"))
    folder.check_out(args.out)
    at.arms.require(settings)
    with folder.workspace(args.out):
        folder.begin(args.out)
        data = _data(args.data, args.out / "data", settings)
        works = _works(list(plan.jobs(chosen, settings, args.out)), settings, data, at, args)
        report.remove(args.out)  # an earlier report must not outlive a refusal
        entries = _train(works, settings, at)
        found = fair.refuse(collect.findings(entries, settings, data), args.allow_mismatch)
        results = summary.results(entries, settings, data, at, found)
        print(report.text(results), flush=True)
        files = report.write(results, args.out)
    print(f"\nwritten: {', '.join(map(str, files))}")
    return 0 if any(arm.verdict != "failed" for arm in results.arms[1:]) else 1


def _settings(args: argparse.Namespace) -> Settings:
    if args.extra and not args.extra[0].startswith("-"):
        raise CompareError(
            f"arguments: got {args.extra[0]!r}; legal are options, and after -- those of the "
            "trainer. Put it behind the option it belongs to."
        )
    ramp = args.lr_ramp is not None
    updates = _updates(args)
    due = args.diagnostics_interval
    return Settings(
        framework=args.framework,
        kind=args.kind,
        size=args.size,
        updates=updates,
        lrs=(args.lr_ramp,) if ramp else _numbers("--lr", args.lr, float),
        seeds=_numbers("--seeds", args.seeds, int),
        window=args.window,
        batch=args.batch,
        device=args.device,
        threads=args.threads if args.threads is not None else _threads(),
        nproc=args.nproc if args.nproc is not None else args.tp * args.pp,
        tp=args.tp,
        pp=args.pp,
        ramp=ramp,
        validations=args.validations,
        diagnostics=due if due is not None else max(1, updates // _RECORDS),
        extra=tuple(args.extra),
    )


def _updates(args: argparse.Namespace) -> int:
    if args.tokens is not None:
        return -(-args.tokens // max(1, args.window * args.batch))
    return _DEFAULTS.updates if args.updates is None else args.updates


def _numbers(option: str, words: Sequence[str], kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(word) for word in re.split(r"[,\s]+", " ".join(words).strip(", ")))
    except ValueError:
        raise CompareError(
            f"{option}: got {' '.join(words)!r}; legal are numbers, separated by commas. Change it."
        ) from None


def _data(given: str, own: Path, settings: Settings) -> Dataset:
    """Return the user's data, checked, or the default corpus, prepared in the output folder."""
    if given != "default":
        data = Dataset(Path(given), manifest.verify(given), settings.framework)
    else:
        data = _default_data(own, settings)
    pairs = data.languages is not None
    labelled = not pairs and "valid" not in data.manifest.splits
    if labelled or pairs != (settings.kind == "mt"):
        need = "pairs (normplugin prepare --source --target)" if settings.kind == "mt" else "text"
        raise CompareError(
            f"--data: got {given} with --kind {settings.kind}; it needs {need}. Prepare that, or "
            "take another --kind."
        )
    assert data.digest  # raises where the framework's files are not there
    return data


def _default_data(own: Path, settings: Settings) -> Dataset:
    _say("data: the running Python's standard library")
    parser = argparse.ArgumentParser()
    prepare_command.add_arguments(parser)
    # --overwrite: what lies in our own folder and is damaged or outdated is made again.
    wanted = ["--out", str(own), "--frameworks", settings.framework, "--overwrite"]
    outcome = prepare(prepare_command.settings_of(parser.parse_args(wanted)))
    _say(f"data: {'already prepared' if outcome.reused else 'prepared'} in {own}")
    return Dataset(own, outcome.manifest, settings.framework)


def _works(
    jobs: Sequence[Job],
    settings: Settings,
    data: Dataset,
    at: Framework,
    args: argparse.Namespace,
) -> list[Work]:
    """Return what to start, after every arm's options were checked and found comparable."""
    facts = {job.arm: (job, at.arms.facts(job, settings, data)) for job in reversed(jobs)}
    fair.refuse(fair.compare([facts[arm] for arm in reversed(facts)]), args.allow_mismatch)
    folder.claim(args.out, {**settings.shared(), "--data": data.digest}, args.force)
    works = [
        Work(
            job,
            at.arms.command(job, settings, data),
            process.environment(
                job.folder, settings.device, settings.threads, at.arms.environment(settings)
            ),
            identity(job, settings, data, at),
        )
        for job in jobs
    ]
    for work in works:
        if args.force:
            forget(work.job)
        else:
            earlier(work)  # raises for a run of other settings, before any is trained
    return works


def _train(works: Sequence[Work], settings: Settings, at: Framework) -> list[Entry]:
    entries = []
    progress = Progress(len(works), settings.updates)
    try:
        for work in works:
            progress.begin(work.job.name)
            done = earlier(work)
            if done is None:
                progress.say(f"log in {work.job.folder / 'train.log'}")
                done = train(work, settings, at, progress)
                progress.end(_ended(done.run))
            else:
                progress.end(f"{_ended(done.run)} earlier, taken as it is", earlier=True)
            entries.append(Entry(work.job, done))
    finally:
        progress.close()
    return entries


def _ended(run: Any) -> str:
    if run.stopped_at is None:
        return f"{run.status}, loss {run.valid[-1].loss:.4f}" if run.valid else run.status
    return f"{run.status} at update {run.stopped_at}: {run.reason}"


def _threads() -> int:
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        usable = os.cpu_count() or 1
    return min(usable, _MAX_THREADS)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
