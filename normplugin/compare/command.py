"""Train norm schemes against the upstream baseline, on the same data, and compare.

Each arm is trained by fairseq's own trainer in its own process: same text, order, seed, number of
tokens and hyperparameters. An arm is an architecture, ours (normformer_tiny, periln_tiny, ...) or
upstream's (transformer_lm_gpt, ...), and may have options of its own, in quotes:

    normplugin compare --out DIR --arms normformer_tiny "preln_tiny --norm-scheme A+C"

Upstream's architectures get the size of the first arm of ours. Without --data the text is the
running Python's standard library. Writes DIR/results.json, DIR/report.md and, per arm, its log,
checkpoint and result. The same command again takes finished arms as they are.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from normplugin.compare import collect, fairseq_arms, fairseq_record, plan, report
from normplugin.compare.plan import Arm, Settings
from normplugin.compare.run import Job, Run, earlier, train
from normplugin.data import command as prepare_command
from normplugin.data import manifest
from normplugin.data.manifest import Manifest
from normplugin.data.prepare import prepare

_MAX_THREADS = 8  # more do not help a model of this size
_DEFAULTS = Settings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``normplugin compare``."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    ours, upstream = " ".join(plan.ARMS), plan.BASELINE
    add("--arms", nargs="+", default=list(plan.ARMS), metavar="ARM", help=f"default: {ours}")
    add("--baseline", default=upstream, metavar="ARM", help=f"default: {upstream}, fairseq's own")
    add("--data", type=Path, metavar="DIR", help="folder of 'normplugin prepare'")
    add("--device", choices=plan.DEVICES, default="cpu", help="default: cpu")
    add("--threads", type=int, metavar="N", help="CPU threads (default: the CPUs, at most 8)")
    _add_shared_arguments(parser)
    add("--force", action="store_true", help="train finished arms again too")
    add(
        "--allow-mismatch",
        action="store_true",
        help="warn, instead of refusing, when arms differ in data, seed, tokens or window",
    )


def _add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    for name, metavar in (("updates", "N"), ("seed", "N"), ("lr", "RATE")):
        default = getattr(_DEFAULTS, name)
        parser.add_argument(
            f"--{name}",
            type=type(default),
            default=default,
            metavar=metavar,
            help=f"the same for every arm (default: {default})",
        )


def run(args: argparse.Namespace) -> int:
    """Check, prepare, train and report."""
    settings = Settings(args.updates, args.seed, args.lr, args.device, _threads(args.threads))
    plan.check_out(args.out)
    fairseq_arms.require(settings.device)
    arms = fairseq_arms.arms(args.arms, args.baseline)
    with plan.workspace(args.out):
        data = args.data or args.out / "data"
        record = _data(args.data, data)
        jobs = _jobs(arms, settings, data, args)
        report.remove(args.out)  # an earlier report must not outlive a refusal
        runs = _train(jobs, args.force)
        results = _results(settings, record, runs, args.allow_mismatch)
        report.write(results, args.out)
    print(report.text(results))
    print(f"\nwritten: {args.out / report.JSON}, {args.out / report.MARKDOWN}")
    return 0


def _results(settings: Settings, record: Manifest, runs: list[Run], allow: bool) -> report.Results:
    """Return the results of comparable runs; raise `CompareError` for others."""
    valid = record.splits["valid"]
    found = collect.mismatches([(run.arm, run.record.facts) for run in runs])
    found += collect.unscored(runs, valid)
    collect.refuse(found, allow)
    numbers = [collect.numbers(run, valid) for run in runs]
    return report.Results(settings, fairseq_arms.versions(), record, runs, numbers, found)


def _data(given: Path | None, folder: Path) -> Manifest:
    """Return the record of the user's data, checked, or prepare the default corpus."""
    if given is not None:
        return manifest.verify(given)
    _say("data: the running Python's standard library")
    parser = argparse.ArgumentParser()
    prepare_command.add_arguments(parser)
    # --overwrite: what lies in our own folder and is damaged or outdated is made again.
    wanted = ["--out", str(folder), "--frameworks", "fairseq", "--overwrite"]
    outcome = prepare(prepare_command.settings_of(parser.parse_args(wanted)))
    _say(f"data: {'already prepared' if outcome.reused else 'prepared'} in {folder}")
    return outcome.manifest


def _jobs(
    arms: Sequence[Arm], settings: Settings, data: Path, args: argparse.Namespace
) -> list[Job]:
    """Return the jobs, after fairseq's own parser took every arm's options."""
    jobs, facts = [], []
    environment = fairseq_arms.environment(settings)
    for arm in arms:
        folder = args.out.resolve() / arm.folder
        command = fairseq_arms.command(arm, arms, settings, data, folder)
        config = fairseq_arms.configuration(arm, command[3:])
        facts.append((arm.name, fairseq_record.settings_facts(config)))
        identity = fairseq_arms.identity(arm, arms, settings, facts[-1][1]["data"])
        jobs.append(Job(arm, command, environment, folder, identity, settings.updates))
    collect.refuse(collect.mismatches(facts), args.allow_mismatch)
    if not args.force:
        for job in jobs:
            earlier(job)  # raises for a finished arm of other settings, before any is trained
    return jobs


def _train(jobs: Sequence[Job], force: bool) -> list[Run]:
    runs = []
    for number, job in enumerate(jobs, start=1):
        head = f"[{number}/{len(jobs)}] {job.arm.name}:"
        done = None if force else earlier(job)
        if done is None:
            _say(f"{head} {job.updates} updates, log in {job.folder / 'train.log'}")
            done = train(job)
            _say(f"{head} done in {done.wall_seconds:.0f} s")
        else:
            _say(f"{head} finished earlier, taken as it is")
        runs.append(done)
    return runs


def _threads(asked: int | None) -> int:
    if asked is not None:
        return asked
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        usable = os.cpu_count() or 1
    return min(usable, _MAX_THREADS)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
