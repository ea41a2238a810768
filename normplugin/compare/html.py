"""``report.html``: one page without network or scripts, for a reader who knows no paper.

`words` says it in sentences, `tables` in numbers, `curves` and `depth` in pictures; `page.html`
and `page.css` lay it out.
"""

from __future__ import annotations

from pathlib import Path

from normplugin.compare import curves, depth, pictures, tables, words
from normplugin.compare.pictures import Picture
from normplugin.compare.results import Results
from normplugin.errors import CompareError

NAME = "report.html"
_HERE = Path(__file__).parent


def render(results: Results, folder: Path) -> str:
    """Return the page.

    Args:
        results: Of a comparison.
        folder: Where it lies; the records of the diagnostics are in there.

    Raises:
        CompareError: What draws or lays out is not installed.
    """
    try:
        return _page(results, folder)
    except ModuleNotFoundError as error:
        raise CompareError(
            f"{NAME}: got no {error.name}, which it is made with. "
            "Run pip install 'normplugin[report]' and the same command again."
        ) from None


def _page(results: Results, folder: Path) -> str:
    import jinja2

    found, warnings = depth.find(results, folder)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html").render(
        results=results,
        css=(_HERE / "page.css").read_text(encoding="utf-8"),
        words=words,
        tables=tables,
        pictures=_pictures(results, found),
        warnings=warnings,
        draw=pictures.draw,
        glyph=pictures.glyph,
        colours=pictures.COLOURS,
    )


def _pictures(results: Results, found: depth.Records) -> dict[str, list[Picture]]:
    """Return the pictures of each section of the page."""
    swept = (curves.rates(results), curves.ramps(results))
    return {
        "losses": [*curves.losses(results)],
        "rates": [picture for picture in swept if picture],
        "depth": [*depth.pictures(results, found)],
    }
