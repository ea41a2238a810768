"""What the diagnostics' records give: pictures over depth and over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from normplugin.compare.curves import finished, listed
from normplugin.compare.pictures import Line, Picture
from normplugin.compare.results import Arm, Results
from normplugin.diagnostics import records
from normplugin.diagnostics.options import DiagnosticsError
from normplugin.diagnostics.records import Record

Records = Mapping[int, Sequence[Record]]  # by the arm's place


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
        caption: How to read it.
        late: Title of the picture over time.
        over_time: What that is of the layers' values at one update, the first layer first.
    """

    key: str
    title: str
    unit: str
    names: tuple[str, ...]
    part: str | None
    log: str
    caption: str
    late: str
    over_time: str


_QUANTITIES = (
    _Quantity(
        "gradient",
        "Gradient of the second FFN weight by layer",
        "mean absolute gradient",
        ("gradient_mean_abs",),
        "fc2",
        "y",
        "How hard each layer is pulled. Pre-LN is known for larger gradients in early layers, "
        "Post-LN for larger ones in late layers; a flat line treats all layers alike.",
        "Gradient: first over last layer",
        "first over last",
    ),
    _Quantity(
        "variance",
        "Variance of the residual stream by layer",
        "variance over channels",
        ("variance",),
        "stream",
        "y",
        "The stream carries the sum of what all layers add. Where it grows fast with depth, what "
        "a late layer adds counts for less.",
        "Variance behind the last layer",
        "last",
    ),
    _Quantity(
        "headroom",
        "Headroom to fp16's largest number by layer",
        "headroom (bits)",
        ("headroom_bits", "raw_headroom_bits"),
        None,
        "",
        "How often the largest activation may double before 16-bit floats overflow. Below the "
        "dotted line it would have.",
        "Smallest headroom of any layer",
        "smallest",
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


def _file(arm: Arm, folder: Path) -> Path | None:
    """Return the file of an arm's records, also where the folder has been moved."""
    for run in arm.at_best():
        if run.diagnostics and finished(run):
            moved = folder.joinpath(*Path(run.diagnostics).parts[-4:])  # runs/ARM/RUN/FILE
            return moved if moved.is_file() else Path(run.diagnostics)
    return None


def _table(
    mine: Sequence[Record], stack: str, quantity: _Quantity
) -> dict[int, dict[int, float | None]]:
    """Return update -> layer -> value; None where a layer was skipped or has no finite number."""
    table: dict[int, dict[int, float | None]] = {}
    for record in mine:
        wanted = record.stack == stack and record.name in quantity.names
        if not wanted or record.layer is None or quantity.part not in (None, record.part):
            continue
        row = table.setdefault(record.update, {})
        values = [v for v in (row.get(record.layer), record.value) if v is not None]
        value = min(values, default=math.nan)
        row[record.layer] = value if math.isfinite(value) and _drawable(value, quantity) else None
    return table


def _drawable(value: float, quantity: _Quantity) -> bool:
    return value > 0.0 or not quantity.log


def _pictures(
    results: Results,
    tables: Mapping[int, dict[int, dict[int, float | None]]],
    quantity: _Quantity,
    stack: str,
    prefix: str,
) -> Iterator[Picture]:
    level = 0.0 if quantity.key == "headroom" else None
    ends = {
        "first": {place: min(table) for place, table in tables.items()},
        "last": {place: max(table) for place, table in tables.items()},
    }
    for end, updates in ends.items():
        rows = {place: sorted(tables[place][update].items()) for place, update in updates.items()}
        at = " or ".join(f"{update:,}" for update in sorted(set(updates.values())))
        yield Picture(
            f"{stack}-{quantity.key}-{end}",
            f"{prefix}{quantity.title}, at update {at}",
            "layer",
            quantity.unit,
            [Line(p, [layer for layer, _ in row], [v for _, v in row]) for p, row in rows.items()],
            "; ".join(
                f"{results.arms[p].name}, first to last layer: {_ends([v for _, v in row])}"
                for p, row in rows.items()
            ),
            quantity.caption if end == "first" else "The same at the end of training.",
            log=quantity.log,
            level=level,
            limits=_limits(tables, ends, quantity),
        )
    lines = [_over_time(place, table, quantity) for place, table in tables.items()]
    finals = {results.arms[line.arm].name: v for line in lines if (v := line.y[-1]) is not None}
    yield Picture(
        f"{stack}-{quantity.key}-time",
        f"{prefix}{quantity.late}, by updates",
        "updates",
        "ratio" if quantity.over_time == "first over last" else quantity.unit,
        lines,
        "at the end " + listed(finals),
        "1: both layers alike." if quantity.over_time == "first over last" else "",
        log=quantity.log,
        level=1.0 if quantity.over_time == "first over last" else level,
    )


def _limits(
    tables: Mapping[int, dict[int, dict[int, float | None]]],
    ends: Mapping[str, Mapping[int, int]],
    quantity: _Quantity,
) -> tuple[float, float] | None:
    """Return limits that hold both ends, so that the two pictures compare."""
    values = [
        value
        for updates in ends.values()
        for place, update in updates.items()
        for value in tables[place][update].values()
        if value is not None
    ]
    if not values:
        return None
    low, high = min(values), max(values)
    if quantity.log:
        return low / 1.3, high * 1.3
    room = 0.06 * (high - min(low, 0.0)) or 1.0
    return min(low, 0.0) - room, high + room


def _over_time(place: int, table: dict[int, dict[int, float | None]], quantity: _Quantity) -> Line:
    updates = sorted(table)
    return Line(
        place,
        updates,
        [_one([*dict(sorted(table[u].items())).values()], quantity) for u in updates],
    )


def _one(values: Sequence[float | None], quantity: _Quantity) -> float | None:
    """Return one number of the layers' values."""
    first, last = values[0], values[-1]
    if quantity.over_time == "smallest":
        return min((value for value in values if value is not None), default=None)
    if quantity.over_time == "last" or last is None:
        return last
    return first / last if first is not None else None


def _ends(values: Sequence[float | None]) -> str:
    said = ["none" if value is None else f"{value:.3g}" for value in (values[0], values[-1])]
    return " to ".join(said)
