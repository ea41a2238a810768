"""Say what is installed, what works and what to do.

Every line is OK, MISSING or BROKEN, then what was found and, where needed, what to do. Each package
is tried in a process of its own (imported, and made to do one tiny piece of its work), because two
installations of one version number may behave differently, and because an import may crash.

Exit code: 0 when fairseq or Megatron-Core is usable and nothing is BROKEN, 1 otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import normplugin
from normplugin.doctor_probes import BROKEN, MARK, OK, Finding

# First finding of a probe -> the function that a child process runs.
PROBES = {
    "torch": "normplugin.doctor_probes:probe_torch",
    "fairseq": "normplugin.doctor_frameworks:probe_fairseq",
    "megatron.core": "normplugin.doctor_frameworks:probe_megatron",
    "transformer_engine": "normplugin.doctor_probes:probe_transformer_engine",
    "apex": "normplugin.doctor_probes:probe_apex",
    "sentencepiece": "normplugin.doctor_probes:probe_sentencepiece",
}

USABLE = {"fairseq": "fairseq", "megatron.core": "Megatron-Core"}

# (package, below this version) with (package, from this version): what happens, what to do.
CLASHES = (
    (
        ("megatron-core", (0, 16)),
        ("numpy", (2,)),
        "its checkpoint code calls numpy.product, which numpy 2 removed: saving fails",
        "pip install 'numpy<2', or megatron-core 0.16 or later",
    ),
    (
        ("fairseq", (0, 12, 2)),
        ("numpy", (1, 24)),
        "it uses numpy.float and numpy.int, which numpy 1.24 removed: training fails",
        "pip install 'numpy<1.24', or fairseq 0.12.2 or later",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds per package (120)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 0 when one framework is usable and nothing is broken."""
    findings = examine(args.timeout)
    usable = usable_frameworks(findings)
    good = bool(usable) and not any(f.status == BROKEN for f in findings)
    if args.json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"ok": good, "usable": usable, "findings": rows}, indent=1))
    else:
        print("\n".join(map(line, findings)))
        print(verdict(findings))
    return 0 if good else 1


def examine(timeout: float = 120.0) -> list[Finding]:
    """Return every finding; the packages are tried two at a time."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        probed = list(pool.map(lambda name: run_probe(name, timeout), PROBES))
    flat = [finding for findings in probed for finding in findings]
    return [python_finding(), package_finding(), *flat, *clash_findings()]


def line(finding: Finding) -> str:
    """Return the finding as one line."""
    action = f"; {finding.action}" if finding.action else ""
    return f"{finding.status:<8} {finding.name:<20} {finding.fact}{action}."


def verdict(findings: list[Finding]) -> str:
    """Return the closing line."""
    usable = usable_frameworks(findings)
    broken = [finding.name for finding in findings if finding.status == BROKEN]
    frameworks = ", ".join(usable) or "none; normplugin needs fairseq or Megatron-Core"
    return f"usable frameworks: {frameworks}; broken: {', '.join(broken) or 'nothing'}."


def usable_frameworks(findings: list[Finding]) -> list[str]:
    """Return the names of the frameworks that were imported and did their tiny task."""
    return [USABLE[f.name] for f in findings if f.name in USABLE and f.status == OK]


def run_probe(name: str, timeout: float) -> list[Finding]:
    """Run one probe in a child process that sees the same import path as this one."""
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
        "from normplugin import doctor_probes; doctor_probes.main(sys.argv[2])"
    )
    # normplugin's own folder goes last, so that it hides nothing the user would import.
    path = [*sys.path, str(Path(normplugin.__file__).resolve().parent.parent)]
    command = [sys.executable, "-c", code, json.dumps(path), PROBES[name]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return [Finding(name, BROKEN, f"no answer within {timeout:g} s", "raise --timeout")]
    for text in reversed(done.stdout.splitlines()):
        if text.startswith(MARK):
            return [Finding(**row) for row in json.loads(text[len(MARK) :])]
    return [Finding(name, BROKEN, crash(done), "reinstall it, or uninstall it if unused")]


def crash(done: subprocess.CompletedProcess[str]) -> str:
    """Say how a probe that reported nothing ended."""
    if done.returncode < 0:
        return f"crashed on import or first use ({signal.Signals(-done.returncode).name})"
    last = ([text for text in done.stderr.splitlines() if text.strip()] or ["no message"])[-1]
    return f"ended with exit code {done.returncode}: {last.strip()[:200]}"


def python_finding() -> Finding:
    """Judge the running Python."""
    fact = f"{platform.python_version()} ({sys.executable})"
    if (3, 10) <= sys.version_info[:2] <= (3, 12):
        return Finding("python", OK, fact)
    return Finding("python", BROKEN, f"{fact}; 3.10 to 3.12 are supported", "use Python 3.12")


def package_finding() -> Finding:
    """Say which copy of this package runs; a stale one explains much."""
    folder = Path(normplugin.__file__).resolve().parent
    return Finding("normplugin", OK, f"{normplugin.__version__} ({folder})")


def clash_findings() -> list[Finding]:
    """Return a finding per known bad pair of versions, or one that says there is none."""
    found = []
    for (old, below), (new, least), why, action in CLASHES:
        old_version, new_version = version_of(old), version_of(new)
        if not (old_version and new_version):
            continue
        if release(old_version) < below and release(new_version) >= least:
            fact = f"{old} {old_version} with {new} {new_version}: {why}"
            found.append(Finding("versions", BROKEN, fact, action))
    return found or [Finding("versions", OK, "no pair that is known to clash")]


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution, or nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: '0.15.0rc1' -> (0, 15, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()
