"""The command: ``python -m benchmarks [fairseq] [megatron] [--quick] [--csv FILE]``."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

SUITES = {"fairseq": "benchmarks.fairseq_suite", "megatron": "benchmarks.megatron_suite"}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suite", nargs="*", metavar="|".join(SUITES), help="default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument("--minutes", type=float, default=5.0, help="timing per suite (default 5)")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--scheme", default="", help="only variants so named, and the stock ones")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default 1)")
    parser.add_argument("--csv", type=Path, help="write the records here")
    args = parser.parse_args(argv)
    unknown = set(args.suite) - set(SUITES)
    if unknown:
        parser.error(f"suite: got {', '.join(sorted(unknown))}; legal: {', '.join(SUITES)}")
    return args


def main(argv: list[str] | None = None) -> None:
    """Run the suites."""
    args = parse(argv)
    import torch

    from benchmarks.records import write_csv
    from benchmarks.report import be_quiet

    be_quiet()
    torch.set_num_threads(args.threads)
    records = []
    for name in args.suite or SUITES:
        suite = importlib.import_module(SUITES[name])
        settings = (args.quick, args.minutes * 60, args.case, args.scheme, args.threads)
        records.append(suite.run(*settings))
    if args.csv:
        write_csv(args.csv, records)
        print(f"\nwrote {args.csv}")


if __name__ == "__main__":
    main()
