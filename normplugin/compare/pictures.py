"""Line pictures as SVG that takes its colours from the page, so that they follow its theme.

Matplotlib draws with marker colours, which are then replaced: ``#fe00NN`` by the page's
``var(--arm-NN)``, two more by the colours of text and of rules.
"""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

COLOURS = 8  # the page defines --arm-0 to --arm-7
_MARKERS = "osD^vPX*"
_GLYPHS = "●■◆▲▼✚✖★○□◇△▽✛✕☆"  # filled, then hollow
_DASHES = ("-", "--", ":")
_INK, _RULE = "#fe0100", "#fe0101"
# The page's --arm-0 to --arm-7 on white, for files.
_PRINTED = (
    *("#1b1d21", "#0a78c2", "#d65f0e", "#006b4f"),
    *("#b0307a", "#6b4400", "#4b2fc9", "#8d949e"),
)
_COUNTS = ("updates", "layer")
_SIZE = (4.2, 2.9)  # inches; small, so that text stays readable on a phone
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "grid.color": _RULE,
    "legend.frameon": False,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK
    ),
}


@dataclass(frozen=True)
class Line:
    """One line of an arm.

    Attributes:
        arm: The arm's place among the arms, which decides colour and marker.
        x: Places.
        y: Values; None where there is none.
        thin: One seed behind the mean.
        crosses: Only crosses: runs that failed.
    """

    arm: int
    x: Sequence[float]
    y: Sequence[float | None]
    thin: bool = False
    crosses: bool = False


@dataclass(frozen=True)
class Picture:
    """What to draw, and what to say of it.

    Attributes:
        name: Unique on the page.
        title: What is seen.
        x: Label and unit of the horizontal axis.
        y: Of the vertical one.
        lines: The arms.
        alt: The same in words.
        caption: How to read it.
        log: Logarithmic axes: any of ``xy``.
        ticks: Places to label on the horizontal axis, instead of round ones.
        level: A horizontal line to compare with.
        limits: Of the vertical axis, where pictures are to be compared.
    """

    name: str
    title: str
    x: str
    y: str
    lines: Sequence[Line]
    alt: str
    caption: str = ""
    log: str = ""
    ticks: Sequence[float] = ()
    level: float | None = None
    limits: tuple[float, float] | None = None

    @property
    def arms(self) -> list[int]:
        """Return the places of the arms that it shows."""
        return sorted({line.arm for line in self.lines})


def glyph(arm: int) -> str:
    """Return the character that looks like an arm's marker."""
    return _GLYPHS[arm % len(_GLYPHS)]


def draw(picture: Picture) -> str:
    """Return the picture as an ``<svg>`` element for the inside of a page.

    Raises:
        ImportError: matplotlib is not installed.
    """
    return _inline(_svg(picture), picture)


def file(picture: Picture, names: Sequence[str]) -> str:
    """Return the picture as an SVG file of its own: white, with the arms' names.

    Raises:
        ImportError: matplotlib is not installed.
    """
    svg = _svg(picture, names)
    svg = re.sub(r"#fe00(\d\d)", lambda found: _PRINTED[int(found[1])], svg)
    return svg.replace(_INK, "#1a1a1a").replace(_RULE, "#dddddd")


def _svg(picture: Picture, names: Sequence[str] = ()) -> str:
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # fairseq has every INFO printed
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**_STYLE, "svg.hashsalt": picture.name}
    ground = "white" if names else "none"
    with matplotlib.rc_context(style):
        figure = Figure(figsize=_SIZE, layout="constrained", facecolor=ground)
        axes = figure.add_subplot(facecolor=ground)
        _axes(axes, picture)
        for line in picture.lines:
            _line(axes, line, "" if line.thin or not names else names[line.arm])
        if picture.level is not None:
            axes.axhline(picture.level, color=_INK, linewidth=1.0, linestyle=":")
        if names:
            axes.set_title(picture.title, fontsize="medium")
            axes.legend(fontsize="small")
        text = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=nothing)
    return text.getvalue()


def _axes(axes: Axes, picture: Picture) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(picture.x)
    axes.set_ylabel(picture.y)
    if "x" in picture.log:
        axes.set_xscale("log")
    if "y" in picture.log:
        axes.set_yscale("log")
        shown = picture.limits or [v for line in picture.lines for v in line.y if v]
        _plain_log(axes.yaxis, shown)
    if picture.x.startswith(_COUNTS):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if picture.ticks:
        axes.set_xticks(picture.ticks, [f"{tick:g}" for tick in picture.ticks])
        axes.minorticks_off()
    if picture.limits:
        axes.set_ylim(picture.limits)


def _plain_log(axis: Axis, values: Sequence[float]) -> None:
    """Label a logarithmic axis with plain numbers, also where it spans less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    decades = math.log10(max(values) / min(values)) if values else 0.0
    steps = (1.0,) if decades > 3 else (1.0, 2.0, 5.0) if decades > 0.7 else tuple(range(1, 10))
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _line(axes: Axes, line: Line, name: str) -> None:
    colour = f"#fe00{line.arm % COLOURS:02x}"
    y = [math.nan if value is None else value for value in line.y]
    if line.crosses:
        axes.plot(line.x, y, "x", color=colour, markersize=9, markeredgewidth=2, clip_on=False)
    elif line.thin:
        axes.plot(line.x, y, color=colour, linewidth=0.8, alpha=0.45)
    else:
        hollow = line.arm // COLOURS % 2
        axes.plot(
            line.x,
            y,
            color=colour,
            linewidth=1.6,
            linestyle=_DASHES[line.arm // COLOURS % len(_DASHES)],
            marker=_MARKERS[line.arm % len(_MARKERS)],
            markerfacecolor="none" if hollow else colour,
            markevery=max(1, len(line.x) // 12),
            markersize=4.5,
            label=name or None,
        )


def _inline(svg: str, picture: Picture) -> str:
    """Cut a file down to its element: unique ids, the page's colours, nothing external."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\s(?:xmlns(?::\w+)?|width|height|version)="[^"]*"', "", svg, count=5)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{picture.name}-", svg)
    svg = re.sub(r"#fe00(\d\d)", lambda found: f"var(--arm-{int(found[1])})", svg)
    svg = svg.replace(_INK, "currentColor").replace(_RULE, "var(--rule)")
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    return svg.replace("<svg", f'<svg role="img" aria-labelledby="{picture.name}-alt"', 1)
