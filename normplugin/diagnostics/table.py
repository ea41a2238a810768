"""The records of one update as text: a table over depth, and one of the learned gains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from normplugin.diagnostics.records import Record

_DEPTH = (
    ("stream", "variance", "stream var"),
    ("stream", "max_abs", "max |x|"),
    ("stream", "headroom_bits", "fp16 bits"),
    ("stream", "angular_distance", "angle/pi"),
    ("attention", "raw_variance", "attn raw var"),
    ("attention", "contribution_variance", "attn adds var"),
    ("cross_attention", "raw_variance", "cross raw var"),
    ("cross_attention", "contribution_variance", "cross adds var"),
    ("ffn", "raw_variance", "ffn raw var"),
    ("ffn", "contribution_variance", "ffn adds var"),
    ("attention", "gradient_norm", "attn |g|"),
    ("ffn", "gradient_norm", "ffn |g|"),
    ("fc2", "gradient_mean_abs", "fc2 mean|g|"),
)
_GAIN = ("gain_mean", "gain_min", "gain_max")


def text(records: Sequence[Record]) -> str:
    """Return both tables of every stack, and the numbers of the whole run."""
    stacks = dict.fromkeys(record.stack for record in records if record.stack)
    lines = []
    for stack in stacks:
        mine = [record for record in records if record.stack == stack]
        lines += [f"{stack}: stream behind each layer (0: in front of the first), sublayers"]
        lines += [*_depth(mine), "", f"{stack}: gains, mean [min max]", *_gains(mine), ""]
        lines += [
            f"{stack}: mean |gradient| of the second FFN weight, first over last layer: "
            f"{_number(record.value)}"
            for record in mine
            if record.name == "gradient_mean_abs_first_over_last"
        ]
    total = next((r.value for r in records if (r.part, r.name) == ("run", "gradient_norm")), None)
    return "\n".join([*lines, f"gradient norm of the whole model: {_number(total)}"])


def _depth(records: Sequence[Record]) -> list[str]:
    values = {(r.layer, r.part, r.name): r.value for r in records}
    columns = [c for c in _DEPTH if any(key[1:] == c[:2] for key in values)]
    layers = sorted({layer for layer, _, _ in values if layer is not None})
    rows = [["layer", *(title for _, _, title in columns)]]
    for layer in layers:
        cells = [_cell(values, (layer, part, name)) for part, name, _ in columns]
        rows.append([str(layer), *cells])
    return _aligned(rows)


def _gains(records: Sequence[Record]) -> list[str]:
    values = {(r.layer, r.part, r.name): r.value for r in records if r.name in _GAIN}
    layers = dict.fromkeys(layer for layer, _, _ in values)
    sites = list(dict.fromkeys(part for layer, part, _ in values if layer))
    rows = [["layer", *sites]]
    outside = []
    for layer in layers:
        if layer:
            rows.append([str(layer), *(_gain(values, layer, site) for site in sites)])
        else:
            parts = dict.fromkeys(part for at, part, _ in values if at == layer)
            outside += [f"{part}: {_gain(values, layer, part)}" for part in parts]
    return [*_aligned(rows), *outside]


def _gain(values: dict, layer: int | None, part: str) -> str:
    mean, low, high = (_cell(values, (layer, part, name)) for name in _GAIN)
    return f"{mean} [{low} {high}]"


def _cell(values: dict, key: tuple) -> str:
    return _number(values[key]) if key in values else "-"


def _number(value: float | None) -> str:
    return "skipped" if value is None else f"{value:.3g}"


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
