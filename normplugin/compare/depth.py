"""What the diagnostics' records give: pictures over depth and over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from normplugin.compare.curves import listed
from normplugin.compare.pictures import Line, Picture
from normplugin.compare.results import Arm, Results
from normplugin.diagnostics import records
from normplugin.diagnostics.options import DiagnosticsError
from normplugin.diagnostics.quantities import first_over_last
from normplugin.diagnostics.records import Record

Records = Mapping[int, Sequence[Record]]  # by the arm's place
Layers = Sequence[float | None]  # one value per layer
Table = Mapping[int, Mapping[int, float | None]]  # update -> layer -> value


def _last(values: Layers) -> float | None:
    return values[-1]


def _smallest(values: Layers) -> float | None:
    return min((value for value in values if value is not None), default=None)


@dataclass(frozen=True)
class _Quantity:
    """One quantity by layer, and one number of it by updates.

    Attributes:
        key: In names of pictures.
        title: Of the picture over depth.
        unit: Label of its axis.
        names: Names of the records; of several at one layer, the smallest counts.
        part: Part of the records; None for any.
        log: Logarithmic axis of the values.
        level: A line to compare with.
        caption: How to read it.
        late: Title, unit, line and caption of the picture over time.
        number: What that shows of the layers' values at one update, the first layer first.
    """

    key: str
    title: str
    unit: str
    names: tuple[str, ...]
    part: str | None
    log: str
    level: float | None
    caption: str
    late: tuple[str, str, float | None, str]
    number: Callable[[Layers], float | None]


_QUANTITIES = (
    _Quantity(
        "gradient",
        "Gradient of the second FFN weight by layer",
        "mean absolute gradient",
        ("gradient_mean_abs",),
        "fc2",
        "y",
        None,
        "How hard each layer is pulled. Pre-LN is known for larger gradients in early layers, "
        "Post-LN for larger ones in late layers; a flat line treats all layers alike.",
        ("Gradient: first over last layer", "ratio", 1.0, "Dotted: both layers alike."),
        first_over_last,
    ),
    _Quantity(
        "variance",
        "Variance of the residual stream by layer",
        "variance over channels",
        ("variance",),
        "stream",
        "y",
        None,
        "The stream carries the sum of what all layers add. Where it grows fast with depth, what "
        "a late layer adds counts for less. Layer 0: in front of the first.",
        ("Variance behind the last layer", "variance over channels", None, "As it grew."),
        _last,
    ),
    _Quantity(
        "headroom",
        "Headroom to fp16's largest number by layer",
        "headroom (bits)",
        ("headroom_bits", "raw_headroom_bits"),
        None,
        "",
        0.0,
        "How often the largest activation may double before 16-bit floats overflow. Below the "
        "dotted line it would have.",
        ("Smallest headroom of any layer", "headroom (bits)", 0.0, "Dotted: fp16 overflows."),
        _smallest,
    ),
)


def find(results: Results, folder: Path) -> tuple[Records, list[str]]:
    """Return each arm's records, of the first finished run at its best rate, and warnings."""
    found, warnings = {}, []
    for place, arm in enumerate(results.arms):
        path = _file(arm, folder)
        if path is None:
            continue
        try:
            read, said = records.read(path)
        except DiagnosticsError as error:
            warnings.append(f"{arm.name}: {error}")
            continue
        warnings += said
        if read:
            found[place] = read
    return found, warnings


def pictures(results: Results, found: Records) -> Iterator[Picture]:
    """Yield every quantity at the first and the last recorded update, and over the updates."""
    stacks = dict.fromkeys(r.stack for mine in found.values() for r in mine if r.layer is not None)
    for stack in stacks:
        prefix = f"{stack}: " if len(stacks) > 1 else ""
        for quantity in _QUANTITIES:
            tables = {place: _table(mine, stack, quantity) for place, mine in found.items()}
            tables = {place: table for place, table in tables.items() if table}
            if tables:
                yield from _pictures(results, tables, quantity, stack, prefix)


def file(diagnostics: str, folder: Path) -> Path:
    """Return a run's file of records, also where the comparison's folder has been moved."""
    moved = folder.joinpath(*Path(diagnostics).parts[-4:])  # runs/ARM/RUN/FILE
    return moved if moved.is_file() else Path(diagnostics)


def _file(arm: Arm, folder: Path) -> Path | None:
    """Return the file of an arm's records, also where the folder has been moved."""
    for run in arm.at_best():
        if run.diagnostics and run.has_loss:
            return file(run.diagnostics, folder)
    return None


def _table(mine: Sequence[Record], stack: str, quantity: _Quantity) -> Table:
    """Return the values; None where a layer was skipped or has no number that can be drawn."""
    table: dict[int, dict[int, float | None]] = {}
    for record in mine:
        wanted = record.stack == stack and record.name in quantity.names
        if not wanted or record.layer is None or quantity.part not in (None, record.part):
            continue
        row = table.setdefault(record.update, {})
        values = [it for it in (row.get(record.layer), record.value) if it is not None]
        value = min(values, default=math.nan)
        drawn = math.isfinite(value) and (value > 0.0 or not quantity.log)
        row[record.layer] = value if drawn else None
    return {update: dict(sorted(table[update].items())) for update in sorted(table)}


def _pictures(
    results: Results, tables: Mapping[int, Table], quantity: _Quantity, stack: str, prefix: str
) -> Iterator[Picture]:
    first = {place: min(table) for place, table in tables.items()}
    last = {place: max(table) for place, table in tables.items()}
    ends = [[*tables[p][u].values()] for at in (first, last) for p, u in at.items()]
    limits = _limits(ends, quantity.log)
    for end, updates in (("first", first), ("last", last)):
        rows = {place: tables[place][update] for place, update in updates.items()}
        at = " or ".join(f"{update:,}" for update in sorted(set(updates.values())))
        yield Picture(
            f"{stack}-{quantity.key}-{end}",
            f"{prefix}{quantity.title}, at update {at}",
            "layer",
            quantity.unit,
            [Line(place, [*row], [*row.values()]) for place, row in rows.items()],
            "first to last layer: " + _ends(results, rows),
            quantity.caption if end == "first" else "The same at the last record, to one scale.",
            log=quantity.log,
            level=quantity.level,
            limits=limits,
        )
    yield _over_time(results, tables, quantity, stack, prefix)


def _over_time(
    results: Results, tables: Mapping[int, Table], quantity: _Quantity, stack: str, prefix: str
) -> Picture:
    title, unit, level, caption = quantity.late
    lines = [
        Line(place, [*table], [quantity.number([*row.values()]) for row in table.values()])
        for place, table in tables.items()
    ]
    ends = {results.arms[line.arm].name: it for line in lines if (it := line.y[-1]) is not None}
    return Picture(
        f"{stack}-{quantity.key}-time",
        f"{prefix}{title}, by updates",
        "updates",
        unit,
        lines,
        "at the end " + listed(ends),
        caption,
        log=quantity.log,
        level=level,
    )


def _limits(rows: Sequence[Layers], log: str) -> tuple[float, float] | None:
    """Return limits that hold all rows; 0 is among them where the axis is linear."""
    values = [value for row in rows for value in row if value is not None]
    if not values:
        return None
    if log:
        return min(values) / 1.3, max(values) * 1.3
    low, high = min(*values, 0.0), max(values)
    room = 0.06 * (high - low) or 1.0
    return low - room, high + room


def _ends(results: Results, rows: Mapping[int, Mapping[int, float | None]]) -> str:
    said = []
    for place, row in rows.items():
        values = ["none" if value is None else f"{value:.3g}" for value in row.values()]
        said.append(f"{results.arms[place].name} {values[0]} to {values[-1]}")
    return ", ".join(said)
