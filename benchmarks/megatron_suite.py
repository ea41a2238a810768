"""The Megatron suite: collectives, saved activations and parameters counted; times beside stock."""

from __future__ import annotations

import megatron.core
import torch

from benchmarks import targets
from benchmarks.layer_runs import forward_backward
from benchmarks.megatron_builders import (
    STOCK,
    VARIANTS,
    build_layer,
    forward_of,
    layer_input,
    process_groups,
)
from benchmarks.megatron_counts import BATCH, LAYOUTS, LENGTH, Counts, count_all
from benchmarks.records import Origin, Row
from benchmarks.report import Place, measure, print_times, time_rows
from benchmarks.tables import table
from normplugin.placement import Dims

FRAMEWORK = "megatron"


def cases(quick: bool) -> list[tuple[Dims, int, int]]:
    """(sizes, length, batch) of the timed layers."""
    if quick:
        return [(Dims(2, 64, 256, 4), 16, 2)]
    return [(Dims(2, 256, 1024, 4), 256, 4), (Dims(2, 768, 3072, 12), 256, 2)]


def run(
    quick: bool, seconds: float, wanted: str = "", schemes: str = "", threads: int = 1
) -> tuple[list[Row], Origin]:
    """Count, time and print; return the records.

    Args:
        quick: Tiny sizes, three rounds.
        seconds: To spend on timing, shared equally among the cases.
        wanted: Only cases whose name contains it.
        schemes: Only variants whose name contains it, beside stock.
        threads: Of torch, for the record.
    """
    chosen = [case for case in cases(quick) if wanted in _name(case[0])]
    names = [name for name in VARIANTS if name == STOCK or schemes in name]
    origin = Origin(f"cpu, {threads} thread(s)", torch.__version__, megatron.core.__version__)
    rows = []
    for dims, _, _ in chosen:
        rows += counts(dims, names)
    for case in chosen:
        rows += timings(*case, names, 0.0 if quick else seconds / len(chosen))
    return rows, origin


def counts(dims: Dims, names: list[str]) -> list[Row]:
    """Count every layout, and print one table for each."""
    rows = []
    header = ["variant", "collectives f + b", "extra", "target", "", "bytes / token f + b"]
    header += ["saved / token", "extra", "per layer", "parameters"]
    for layout, found in count_all(dims, names).items():
        stock = found[STOCK]
        lines = []
        for name, mine in found.items():
            verdict = _verdict(name, mine, stock) if layout != LAYOUTS[0].name else ("", "")
            lines.append([name, *_traffic_cells(mine, stock, verdict), *_size_cells(mine, stock)])
            rows += _count_rows(dims, layout, name, mine, stock)
        size = f"width {dims.d_model}, {LENGTH} x {BATCH} tokens, rank 0"
        print(f"\nCounts, one fp32 layer, {layout}, {size}")
        print("(bytes: sent by a rank, ring algorithm; saved: per token, unit d_model)\n")
        print(table(header, lines))
    return rows


def _verdict(name: str, mine: Counts, stock: Counts) -> tuple[str, str]:
    limit = targets.COLLECTIVES_EXTRA.get(name)
    if limit is None:
        return "", ""
    reached = all(map(int.__le__, _extra(mine, stock), limit))
    return "{:+d} {:+d}".format(*limit), "reached" if reached else "missed"


def _extra(mine: Counts, stock: Counts) -> tuple[int, int]:
    return mine.forward.calls - stock.forward.calls, mine.backward.calls - stock.backward.calls


def _traffic_cells(mine: Counts, stock: Counts, verdict: tuple[str, str]) -> list[str]:
    sent = [f"{traffic.sent / (LENGTH * BATCH):.0f}" for traffic in (mine.forward, mine.backward)]
    extra = "{:+d} {:+d}".format(*_extra(mine, stock))
    calls = f"{mine.forward.calls} + {mine.backward.calls}"
    return [calls, extra, *verdict, " + ".join(sent)]


def _size_cells(mine: Counts, stock: Counts) -> list[str]:
    extra = f"{mine.saved - stock.saved:+.3f}"
    return [f"{mine.saved:.3f}", extra, f"{mine.constant:.0f}", f"{mine.parameters:,}"]


def _count_rows(dims: Dims, layout: str, name: str, mine: Counts, stock: Counts) -> list[Row]:
    shape = f"d{dims.d_model} ffn{dims.d_ffn} h{dims.n_heads} {BATCH}x{LENGTH}"
    place = Place(f"layer {layout} d{dims.d_model}", FRAMEWORK, shape, "float32")
    rows = [
        place.row(name, "forward", "saved", "d_model", mine.saved),
        place.row(name, "forward", "saved_extra", "d_model", mine.saved - stock.saved),
        place.row(name, "forward", "parameters", "1", float(mine.parameters)),
    ]
    extras = zip(("forward", "backward"), _extra(mine, stock), strict=True)
    for mode, extra in extras:
        traffic = getattr(mine, mode)
        calls = float(traffic.calls)
        rows.append(place.row(name, mode, "collectives", "1", calls, str(traffic.sent)))
        rows.append(place.row(name, mode, "collectives_extra", f"- {STOCK}", float(extra)))
    return rows


def timings(dims: Dims, length: int, batch: int, names: list[str], seconds: float) -> list[Row]:
    """Time the layers of a case on one rank, and print its table."""
    shape = f"d{dims.d_model} ffn{dims.d_ffn} h{dims.n_heads} {batch}x{length}"
    place = Place(_name(dims), FRAMEWORK, shape, "float32")
    with process_groups():
        runners = {}
        for name in names:
            layer = build_layer(name, dims)
            x, hidden = layer_input(dims, length, batch)
            runners[name] = forward_backward(layer, forward_of(layer, hidden), x)
        times = measure(place.case, runners, seconds)
    print_times(f"Megatron {place.case} ({shape})", times, STOCK)
    return time_rows(place, times, [STOCK])


def _name(dims: Dims) -> str:
    return f"layer d{dims.d_model}"
