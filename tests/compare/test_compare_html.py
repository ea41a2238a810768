"""The page a comparison is read on: complete, escaped, valid, and sufficient unto itself."""

from __future__ import annotations

import builtins
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from normplugin.compare import html, pictures, report
from normplugin.compare.results import (
    DIVERGED,
    FAILED,
    FINISHED,
    SCHEMA,
    Arm,
    Loss,
    LossAt,
    Point,
    Ramp,
    Results,
    Run,
)
from normplugin.errors import CompareError

_VOID = {"meta", "br", "hr", "img", "input", "link"}


def run(lr=2e-3, seed=1, loss=2.0, status=FINISHED, diagnostics=None, ramp=None) -> Run:
    ended = status == FINISHED
    return Run(
        lr=lr,
        seed=seed,
        status=status,
        stopped_at=None if ended else 17,
        reason=None if ended else "no memory <left>",
        command=["fairseq-train", "a b", "--lr", str(lr)],
        log="runs/log",
        train=[Point(u, 8 * u, u / 2, loss + 9 / u) for u in (1, 2, 3)],
        valid=[Point(u, 8 * u, u / 2, loss + 3 - u) for u in (1, 2, 3)] if ended else [],
        step_seconds=0.5 if ended else None,
        tokens_per_second=1234.0 if ended else None,
        quartiles=[1200.0, 1300.0] if ended else [],
        peak_memory_bytes=3 * 2**20 if ended else None,
        cpu_share=None,
        diagnostics=diagnostics,
        ramp=ramp,
    )


def arm(name: str, runs: list[Run], verdict: str, scheme: str | None = None, **numbers) -> Arm:
    ended = [it for it in runs if it.status == FINISHED]
    given = {
        **dict.fromkeys(field.name for field in dataclasses.fields(Arm)),
        "parameters": 1_000_123,
        "loss": Loss(ended[0].valid[-1].loss, 0.0123, len(ended)) if ended else None,
        "best_lr": ended[0].lr if ended else None,
        "loss_at": LossAt(2.1111, 2.2222, 2.3333) if ended else None,
        "speed_in_doubt": False,
    }
    given |= {"name": name, "scheme": scheme, "options": [], "runs": runs, "verdict": verdict}
    return Arm(**given | numbers)


def comparison(*others: Arm, **changed) -> Results:
    base = arm("upstream", [run(seed=1), run(seed=2)], "baseline")
    fixed = Results(
        schema=SCHEMA,
        title="a title",
        settings={"framework": "fairseq", "kind": "lm", "lrs": [2e-3, 1e-2]},
        versions={"torch": "7.8.9"},
        machine={"processor": "an abacus"},
        data={"name": "text", "splits": {"train": {"tokens": 41145}}},
        facts={"window": 128},
        baseline="upstream",
        arms=[base, *others],
        mismatches=[],
        cautions=[],
    )
    return dataclasses.replace(fixed, **changed)


def normformer(**numbers) -> Arm:
    runs = [run(loss=1.5), run(loss=1.5, seed=2), run(1e-2, status=DIVERGED)]
    return arm("normformer", runs, "better", "normformer", p_value=0.0123, **numbers)


class _Checker(HTMLParser):
    """Every element is closed in its place, every id is there once, every reference is met."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag, attrs) -> None:
        for name, value in attrs:
            self.ids += [value] * (name == "id")
            self.references += [value] * (name == "aria-labelledby")
            self.references += re.findall(r"url\(#([^)]+)\)", value or "")
            self.references += [(value or "")[1:]] * (name == "href")

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def check(page: str) -> None:
    """Assert that a page is well-formed and asks for nothing outside itself."""
    checker = _Checker()
    checker.feed(page)
    checker.close()
    assert not checker.open
    assert len(checker.ids) == len(set(checker.ids))
    assert set(checker.references) <= set(checker.ids)
    assert page.startswith("<!DOCTYPE html>")
    assert not re.search(r"https?:|src=|<script|<link|@import|url\((?!#)", page)


def words(page: str) -> str:
    """Return what is read: no markup, single spaces."""
    bare = re.sub(r"<style.*?</style>|<svg.*?</svg>|<[^>]+>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", bare)


def test_every_arm_number_failure_mismatch_and_caution_is_told(tmp_path: Path) -> None:
    """Nothing of the results is kept from the reader."""
    numbers = {
        "bits_per_byte": 1.2345,
        "token_perplexity": 4.56,
        "word_perplexity": 789.0,
        "speed_ratio": 0.97,
        "memory_ratio": 1.08,
        "updates_to_baseline_loss": 2.0,
        "seconds_to_baseline_loss": 1.5,
        "parameter_delta": 123,
    }
    lost = arm("postln", [run(status=FAILED)], "failed", "postln", parameters=None)
    page = html.render(
        comparison(
            normformer(**numbers),
            lost,
            mismatches=["window: got 64; 128 is theirs"],
            cautions=["one try only."],
        ),
        tmp_path,
    )
    check(page)
    said = words(page)
    for word in (
        *("upstream", "normformer", "postln", "Better than upstream: normformer (-25.0% loss)."),
        *("1.5000", "± 0.0123", "p = 0.012", "1.2345", "4.56", "789", "0.97x", "1.08x", "+123"),
        *("1,000,123", "diverged at update 17", "failed at update 17", "window: got 64"),
        *("one try only.", "2.1111", "2.2222", "2.3333", "1,234", "7.8.9", "an abacus", "41,145"),
        "fairseq-train &#39;a b&#39; --lr 0.01",
        "after 2 of 3 updates",
        "no learning rate at which every seed finished (failed at update 17: no memory",
    ):
        assert word in said, word
    assert {"loss-updates-alt", "loss-time-alt", "rates-alt"} <= set(
        re.findall(r'id="([\w-]+-alt)"', page)
    )


def test_a_missing_number_is_a_dash_with_its_reason(tmp_path: Path) -> None:
    """No cell is left empty or says None."""
    said = words(html.render(comparison(arm("postln", [run(status=FAILED)], "failed")), tmp_path))
    assert "None" not in said
    for reason in ("not finished", "not measured", "too large"):
        assert f"\N{EN DASH} {reason}" in said


def test_names_are_escaped(tmp_path: Path) -> None:
    """What a user or a log wrote cannot become markup."""
    evil = '<b onload="x">&'
    failed = arm(evil, [run(status=FAILED)], "failed", evil)
    page = html.render(comparison(failed, title=evil, cautions=[evil], mismatches=[evil]), tmp_path)
    check(page)
    assert "<b " not in page
    assert "&lt;b onload" in page


def test_one_seed_is_called_one_seed(tmp_path: Path) -> None:
    """A single try is no verdict."""
    single = arm("periln", [run(loss=1.9)], "one seed", "periln")
    said = words(html.render(comparison(single), tmp_path))
    assert "One seed, so no verdict against upstream: periln (-5.0% loss)." in said
    assert "one seed, so this may be chance" in said


def test_a_ramp_tells_what_each_arm_survived(tmp_path: Path) -> None:
    """With a growing learning rate there are no losses to rank, only updates survived."""
    ramps = [Ramp(0.1, updates, updates / 10, True) for updates in (20, 31)]
    ours, base = (
        arm(name, [run(status=DIVERGED, ramp=it)], "one seed")
        for name, it in zip(("periln", "upstream"), ramps[::-1], strict=True)
    )
    found = comparison(arms=[base, ours])
    page = html.render(found, tmp_path)
    check(page)
    table = report.text(found).splitlines()
    assert [row.split(" | ")[2].strip() for row in table[2:4]] == ["20 (n = 1)", "31 (n = 1)"]
    assert "perplexity per token" not in page and "ppl/token" not in table[0]
    assert "survived 31 updates of a growing learning rate, up to 3.1; upstream 20" in words(page)
    assert 'id="ramp-alt"' in page


def _records(path: Path, *values: float | None) -> str:
    path.parent.mkdir(parents=True)
    rows = [
        {"schema": 1, "update": u, "stack": "decoder", "layer": n, "part": p, "name": name}
        | {"value": value}
        for u in (1, 3)
        for n, value in enumerate(values, 1)
        for p, name in (
            ("fc2", "gradient_mean_abs"),
            ("stream", "variance"),
            ("stream", "headroom_bits"),
        )
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_diagnostics_are_drawn_over_depth_and_over_time(tmp_path: Path) -> None:
    """Also where a layer was skipped, a value is no number, or the folder was moved."""
    path = _records(tmp_path / "runs" / "periln" / "r" / "diagnostics.jsonl", 4.0, None, 2.0)
    moved = str(Path("/gone", *Path(path).parts[-4:]))
    page = html.render(
        comparison(arm("periln", [run(diagnostics=moved)], "one seed", "periln")), tmp_path
    )
    check(page)
    said = words(page)
    for title in ("Gradient of the second FFN weight", "Variance of the residual stream"):
        assert f"{title} by layer, at update 3: first to last layer: periln 4 to 2." in said
    assert "Gradient: first over last layer, by updates: at the end periln 2." in said
    assert "Variance behind the last layer, by updates: at the end periln 2." in said


@pytest.mark.parametrize(
    ("text", "reason"), [(None, "cannot be read"), ("{}\n", "JSON lines of normplugin")]
)
def test_damaged_diagnostics_are_a_sentence(tmp_path: Path, text: str, reason: str) -> None:
    """They take nothing else of the report with them."""
    path = tmp_path / "diagnostics.jsonl"
    if text:
        path.write_text(text, encoding="utf-8")
    page = html.render(
        comparison(arm("periln", [run(diagnostics=str(path))], "one seed")), tmp_path
    )
    check(page)
    assert reason in words(page)


def test_without_diagnostics_it_says_so(tmp_path: Path) -> None:
    """A section is never silently empty."""
    assert "Nothing was recorded" in words(html.render(comparison(normformer()), tmp_path))


def test_nothing_finished_still_gives_a_page(tmp_path: Path) -> None:
    """The failures are the report then."""
    arms = [arm(name, [run(status=FAILED)], "failed") for name in ("upstream", "periln")]
    page = html.render(comparison(arms=arms), tmp_path)
    check(page)
    assert "did not finish, so nothing can be ranked" in words(page)


def test_an_arm_has_one_colour_in_every_picture(tmp_path: Path) -> None:
    """Colours come from the page, so that they follow light and dark."""
    page = html.render(comparison(normformer()), tmp_path)
    drawn = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawn) == 5
    assert all("var(--arm-1)" in it and "#fe0" not in it for it in drawn)


def test_every_arm_s_colour_is_defined_for_light_and_dark() -> None:
    """More arms than colours begin again, told apart by dashes and hollow markers."""
    css = (Path(html.__file__).parent / "page.css").read_text(encoding="utf-8")
    for number in range(pictures.COLOURS):
        assert css.count(f"--arm-{number}:") == 2
    line = pictures.Line(pictures.COLOURS + 1, [1, 2], [1, 2])
    svg = pictures.draw(pictures.Picture("p", "t", "x", "y", [line], "alt"))
    assert "var(--arm-1)" in svg
    assert "stroke-dasharray" in svg
    glyphs = [pictures.glyph(number) for number in range(2 * pictures.COLOURS)]
    assert len(set(glyphs)) == len(glyphs)


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_what_is_not_installed_is_one_sentence(tmp_path, monkeypatch, missing: str) -> None:
    """It names the extra to install."""
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(
        CompareError, match=rf"got no {missing}.*pip install 'normplugin\[report\]'"
    ):
        html.render(comparison(normformer()), tmp_path)
