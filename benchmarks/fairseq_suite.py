"""The fairseq suite: counts, times, targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import fairseq
import torch

from benchmarks import targets
from benchmarks.fairseq_builders import STOCK, UPSTREAM_NORMFORMER, VARIANTS, Shape, Variant
from benchmarks.fairseq_cases import layer_runner, parameters, saved_per_token, step_runner
from benchmarks.records import Origin, Row
from benchmarks.report import Place, measure, print_times, time_rows
from benchmarks.tables import ratio, table
from benchmarks.timing import CPU, Runner, Times
from normplugin.placement import Dims


@dataclass(frozen=True)
class Case:
    """A timed case and its share of the time."""

    name: str
    shape: Shape
    share: float

    @property
    def build(self) -> Callable[[Variant, Shape], Runner]:
        """A vocabulary makes it a training step."""
        return step_runner if self.shape.vocabulary else layer_runner


def cases(quick: bool) -> list[Case]:
    """Layers and whole steps at both widths; ``quick`` proves only that everything runs."""
    if quick:
        dims = Dims(2, 64, 256, 4)
        return [
            Case("layer d64", Shape(dims, 2, 16), 1),
            Case("step d64", Shape(dims, 2, 16, 100), 1),
        ]
    small, large = Dims(4, 256, 1024, 4), Dims(3, 768, 3072, 12)
    return [
        Case("layer d256", Shape(small, 4, 256), 1),
        Case("layer d768", Shape(large, 2, 256), 2),
        Case("step d256", Shape(small, 4, 256, 8000), 2),
        Case("step d768", Shape(large, 2, 256, 8000), 7),
    ]


def run(
    quick: bool, seconds: float, wanted: str = "", schemes: str = "", threads: int = 1
) -> tuple[list[Row], Origin]:
    """Count, time and print; return the records.

    Args:
        quick: Tiny sizes, three rounds.
        seconds: To spend on timing, shared among the cases.
        wanted: Only cases whose name contains it.
        schemes: Only variants whose name contains it, beside the two stock ones.
        threads: Of torch, for the record.
    """
    chosen = [case for case in cases(quick) if wanted in case.name]
    variants = [v for v in VARIANTS if v.scheme is None or schemes in v.name]
    origin = Origin(f"cpu, {threads} thread(s)", torch.__version__, fairseq.__version__)
    rows = counts(list({case.shape.dims.d_model: case.shape.dims for case in chosen}.values()))
    unit = seconds / sum(case.share for case in chosen) if chosen else 0.0
    for case in chosen:
        rows += timings(case, variants, 0.0 if quick else unit * case.share)
    return rows, origin


def counts(sizes: Sequence[Dims]) -> list[Row]:
    """Saved activations and parameters: the same on every machine."""
    rows: list[Row] = []
    header = ["variant", "saved / token", "extra", "per layer", "parameters", "target", ""]
    for dims in sizes:
        stock, _ = saved_per_token(VARIANTS[0], dims)
        lines = []
        for variant in VARIANTS:
            saved, constant = saved_per_token(variant, dims)
            extra, size = saved - stock, parameters(variant, dims)
            rows += _count_rows(variant, dims, {"saved": saved, "saved_extra": extra}, size)
            cells = [variant.name, f"{saved:.3f}", f"{extra:+.3f}", f"{constant:.0f}", f"{size:,}"]
            lines.append([*cells, *_saved_verdict(variant, extra, dims)])
        print(f"\nCounts, one layer, width {dims.d_model}: saved activations in units of d_model")
        print("(target: up to the statistics of the added norms, 2 floats per norm and token)\n")
        print(table(header, lines))
    return rows


def _saved_verdict(variant: Variant, extra: float, dims: Dims) -> tuple[str, str]:
    limit = {t.variant: t.limit for t in targets.SAVED_EXTRA}.get(variant.name)
    if limit is None:
        return "", ""
    allowed = limit + targets.statistics_allowance(dims.d_model)
    return f"{limit:+.1f}", targets.verdict(extra, allowed)


def _count_rows(
    variant: Variant, dims: Dims, saved: dict[str, float], parameter_count: int
) -> list[Row]:
    counted = {name: (value, "d_model") for name, value in saved.items()}
    counted["parameters"] = (float(parameter_count), "1")
    shape = f"d{dims.d_model} ffn{dims.d_ffn} h{dims.n_heads}"
    place = Place(f"layer d{dims.d_model}", "fairseq", shape, "float32")
    return [
        place.row(variant.name, "forward", metric, unit, value)
        for metric, (value, unit) in counted.items()
    ]


def timings(case: Case, variants: Sequence[Variant], seconds: float) -> list[Row]:
    """Time all variants of a case and print its table."""
    runners = {v.name: case.build(v, case.shape) for v in variants}
    times = measure(case.name, runners, seconds)
    print_times(f"{case.name} ({case.shape})", times, STOCK)
    if case.shape.vocabulary and case.shape.dims.d_model == targets.STEP_TIME_WIDTH:
        _print_targets(times)
    place = Place(case.name, "fairseq", str(case.shape), "float32")
    return time_rows(place, times, (STOCK, UPSTREAM_NORMFORMER))


def _print_targets(times: Times) -> None:
    lines = []
    for target in targets.STEP_TIME:
        if target.variant not in times.seconds:
            continue
        cells = [f"{target.variant} / {target.against}", f"<= {target.limit:.2f}"]
        for kind in ("", CPU):
            measured = times.ratio(target.variant, target.against, "step" + kind)
            cells += [ratio(measured), targets.verdict(measured, target.limit)]
        quiet = times.quiet_ratio(target.variant, target.against, "step" + CPU)
        lines.append([*cells, f"{quiet:.3f}"])
    print("\nStep time against the design's targets\n")
    print(table(["quantity", "target", "wall", "", "CPU time", "", "its p20s"], lines))
