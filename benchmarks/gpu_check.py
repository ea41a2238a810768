"""Is a CUDA GPU served right? Parity of the norms, apex, then times and memory beside stock."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_layers import Contest, contests
from benchmarks.gpu_parity import Parity, check_all
from benchmarks.records import Origin, Row, write_csv
from benchmarks.report import Place, be_quiet, measure, print_times, time_rows
from benchmarks.tables import table
from benchmarks.timing import Runner
from normplugin.kernels import apex_norm

FRAMEWORKS = {"fairseq": "fairseq", "megatron": "megatron.core"}


@dataclass(frozen=True)
class Sizes:
    """Of a run: parity's rows and widths, the layers', and seconds of timing per contest."""

    rows: int
    widths: tuple[int, ...]
    d_model: int
    n_heads: int
    length: int
    batch: int
    seconds: float


GPU = Sizes(4096, (768, 1000, 4096), 1024, 16, 1024, 8, 20.0)
DRY = Sizes(64, (96,), 64, 4, 16, 2, 0.0)


def main(argv: list[str] | None = None) -> int:
    """Run all parts; 1 if a parity fails or a part breaks, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_check.sh", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: dry run")
    parser.add_argument("--csv", type=Path, default=Path("out/gpu_check.csv"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA GPU; run it on one, or dry-run it with --device cpu.")
        return 2
    be_quiet()
    torch.backends.cuda.matmul.allow_tf32 = False  # fp32 parity is of fp32 products
    start, sizes = time.perf_counter(), GPU if args.device == "cuda" else DRY
    print(f"device: {_device(args.device)}; torch {torch.__version__}")
    _print_apex(args.device)
    parities = list(check_all(args.device, sizes.rows, sizes.widths))
    failed = print_parity(parities)
    rows, broken = _compare_all(args.device, sizes)
    origin = Origin(_device(args.device), torch.__version__, _versions(), command=_command())
    write_csv(args.csv, [(_parity_rows(parities, sizes) + rows, origin)])
    print(f"\nwrote {args.csv}; {time.perf_counter() - start:.0f} s")
    verdict = f"{len(failed)} of {len(parities)} parities FAILED" if failed else "parity holds"
    print(f"gpu_check: {verdict}" + (f"; did not run: {', '.join(broken)}" if broken else ""))
    return 1 if failed or broken else 0


def _device(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu (dry run)"


def _command() -> str:
    return " ".join(["python -m benchmarks.gpu_check", *sys.argv[1:]])


def _versions() -> str:
    """Of the frameworks that import."""
    found = []
    for name, module in FRAMEWORKS.items():
        with contextlib.suppress(ImportError):
            found.append(f"{name} {importlib.import_module(module).__version__}")
    return ", ".join(found)


def _print_apex(device: str) -> None:
    """What the probe chose; parity below is then of apex's kernels."""
    for kind in ("layernorm", "rmsnorm"):
        fused = apex_norm(kind, device)
        print(f"apex {kind}: {'in use' if fused else 'not in use, torch serves'}")
        assert apex_norm(kind, "cpu") is None


def print_parity(parities: list[Parity]) -> list[Parity]:
    """Print the worst case of every operation and dtype, and all that fail; return those."""
    worst: dict[tuple[str, str], Parity] = {}
    for parity in parities:
        key = (parity.operation, parity.dtype)
        if key not in worst or not parity.share <= worst[key].share:
            worst[key] = parity
    failed = [parity for parity in parities if not parity.ok]
    shown = [*worst.values(), *(p for p in failed if p not in worst.values())]
    print("\nParity with normplugin.reference: error / allowed (1 is the limit), worst case\n")
    header = ["operation", "dtype", "norm", "width", "of", "error / allowed", ""]
    lines = [
        [p.operation, p.dtype, p.spec, str(p.width), p.worst, f"{p.share:.3f}", _word(p)]
        for p in shown
    ]
    print(table(header, lines))
    return failed


def _word(parity: Parity) -> str:
    return "ok" if parity.ok else "FAILED"


def _parity_rows(parities: list[Parity], sizes: Sizes) -> list[Row]:
    rows = []
    for p in parities:
        place = Place(f"parity {p.spec}", "torch", f"{sizes.rows}x{p.width}", p.dtype)
        rows.append(place.row(p.operation, "step", "error_share", p.worst, p.share))
    return rows


def _compare_all(device: str, sizes: Sizes) -> tuple[list[Row], list[str]]:
    """Time and measure every contest; one that breaks is reported and does not stop the rest."""
    rows, broken = [], []
    for name, start in contests(device, sizes).items():
        module = FRAMEWORKS.get(name)
        if module and not _imports(module):
            print(f"\n{name}: skipped, {module} cannot be imported")
            continue
        try:
            with start() as contest:
                rows += _compare(contest, device, sizes.seconds)
        except Exception as error:
            print(f"\n{name}: BROKE, {type(error).__name__}: {error}")
            broken.append(name)
    return rows, broken


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _compare(contest: Contest, device: str, seconds: float) -> list[Row]:
    """Times interleaved; memory of each runner on its own."""
    rows, lines = [], []
    times = measure(contest.place.case, contest.runners, seconds)
    print_times(f"{contest.place.case} ({contest.place.shape}, {contest.place.dtype})", times,
                contest.stock)  # fmt: skip
    rows += time_rows(contest.place, times, [contest.stock])
    peaks = {name: _peak(runner, device) for name, runner in contest.runners.items()}
    for name, saved in contest.saved.items():
        extra = saved - contest.saved[contest.stock]
        peak = (peaks[name] - peaks[contest.stock]) / 2**20
        lines.append([name, f"{saved:.3f}", f"{extra:+.3f}", f"{peaks[name] / 2**20:.1f}"])
        lines[-1].append(f"{peak:+.1f}")
        rows.append(contest.place.row(name, "forward", "saved", "input width", saved))
        rows.append(contest.place.row(name, "step", "peak", "B", float(peaks[name])))
    print("\nMemory: saved activations per token, unit: the input's width; a step's peak\n")
    print(table(["variant", "saved / token", "extra", "peak, MiB", "extra"], lines))
    return rows


def _peak(runner: Runner, device: str) -> int:
    """Bytes of a step above what was allocated before; 0 on a CPU, which does not count them."""
    runner()  # gradients and workspaces exist
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    sys.exit(main())
