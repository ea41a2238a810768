"""Laws of ranking: equal facts or a refusal, and one definition of every number."""

from __future__ import annotations

import math
import re

import pytest

from normplugin.compare import collect, report
from normplugin.compare.fairseq_record import Record
from normplugin.compare.plan import Settings
from normplugin.compare.run import Run
from normplugin.data.encode import SplitCounts
from normplugin.data.manifest import Manifest
from normplugin.errors import CompareError

VALID = SplitCounts(documents=10, tokens=1000, words=400, bytes=3000)
FACTS = {
    "data": "a1",
    "window": 128,
    "seed": 1,
    "trained tokens": 8000,
    "tokens per update": [[10.0, 2048.0], [20.0, 2048.0], [30.0, 2048.0]],
    "updates": 30,
    "scored tokens": 1000,
}


def make_run(arm, bits=2000.0, parameters=1000, rate=0.002, speeds=(100.0,) * 4, cpu=2.0, **facts):
    """A finished run, by hand."""
    intervals = [
        {"updates": i + 1.0, "tokens_per_update": 2048.0, "tokens_per_second": s, "loss_bits": 2.0}
        for i, s in enumerate(speeds)
    ]
    record = Record({**FACTS, **facts}, {"learning rate": [rate]}, "M", None, parameters, bits, [])
    return Run(arm, Record(**{**vars(record), "intervals": intervals}), 1.0, cpu, 2**20)


def found(**facts):
    """The mismatches of an arm with these facts against the baseline."""
    return collect.mismatches([("base", FACTS), ("arm", {**FACTS, **facts})])


def test_equal_facts_may_be_ranked():
    """No difference, no finding, no refusal."""
    assert found() == []
    collect.refuse([], allow=False)


@pytest.mark.parametrize("fact", ["data", "window", "seed", "trained tokens", "scored tokens"])
def test_a_difference_names_its_field_both_values_and_the_arm(fact):
    """Any single fact that differs is refused by name; the switch turns it into a finding."""
    (line,) = found(**{fact: 7})
    assert line.startswith(f"{fact}: got 7 for arm 'arm'; {FACTS[fact]} for the baseline 'base'")
    with pytest.raises(CompareError, match=rf"^{fact}: got 7 .*--allow-mismatch"):
        collect.refuse([line], allow=False)
    collect.refuse([line], allow=True)


def test_a_missing_fact_is_a_difference():
    """A fact that only one of them recorded cannot be equal."""
    assert collect.mismatches([("a", {}), ("b", {"units": "nats"})]) == [
        "units: got nats for arm 'b'; None for the baseline 'a'"
    ]


def test_other_tokens_per_update_name_the_first_update():
    """The log lines are compared one by one, and the first that differs is named."""
    other = [[10.0, 2048.0], [20.0, 4096.0], [30.0, 1.0]]
    (line,) = found(**{"tokens per update": other})
    assert line.endswith(
        "got 4096.0 for arm 'arm'; 2048.0 for the baseline 'base', first at update 20"
    )


def test_several_findings_are_counted():
    """The first is shown with the number of the others."""
    with pytest.raises(CompareError, match=re.escape("(1 more)")):
        collect.refuse(found(seed=2, window=64), allow=False)


def test_a_run_scored_on_part_of_the_validation_split_is_found():
    """Bits per byte need every token of the split, the eos of each document included."""
    runs = [make_run("a"), make_run("b", **{"scored tokens": 990})]
    assert collect.unscored(runs, VALID) == [
        "scored tokens: got 990 for arm 'b'; the validation split has 1,000"
    ]


def test_tokens_per_second_skip_the_warm_up():
    """20 intervals, the first 5 ten times slower: the median of the other 15."""
    speeds = [100.0] * 5 + [1000.0 + i for i in range(15)]
    assert collect.numbers(make_run("a", speeds=speeds), VALID).tokens_per_second == 1007.0


def test_too_few_log_intervals_are_refused():
    """No measured interval, no speed."""
    with pytest.raises(CompareError, match="tokens/s: got 1 log intervals"):
        collect.numbers(make_run("a", speeds=[0.0]), VALID)


def test_the_loss_comes_in_nats_and_per_byte():
    """2,000 bits over 1,000 tokens and 3,000 bytes, by hand."""
    numbers = collect.numbers(make_run("a"), VALID)
    assert numbers.loss == pytest.approx(2.0 * math.log(2.0), rel=1e-12)
    assert numbers.bits_per_byte == pytest.approx(2.0 / 3.0, rel=1e-12)
    assert numbers.token_perplexity == pytest.approx(4.0, rel=1e-12)
    assert numbers.word_perplexity == pytest.approx(32.0, rel=1e-12)


def said(*runs):
    """The cautions of these runs, as one text."""
    return " ".join(collect.cautions(runs, [collect.numbers(run, VALID) for run in runs]))


def test_cautions_name_the_seed_and_unequal_rates():
    """One seed is always named; different rates without a sweep are prominent."""
    same = said(make_run("a"), make_run("b"))
    assert "one seed per arm: differences of this size are not a result" in same
    assert "DIFFERENT" not in same
    assert "DIFFERENT learning rates" in said(make_run("a"), make_run("b", rate=0.01))


@pytest.mark.parametrize("busy", [{"speeds": (90.0, 90.0, 100.0, 120.0)}, {"cpu": 1.7}])
def test_speeds_of_a_busy_machine_are_marked(busy):
    """Speed or CPU share moved by more than 10 %: the arm is named; a calm one is not."""
    assert "other work during busy (" in said(make_run("calm"), make_run("busy", **busy))
    assert "the machine had other work" not in said(make_run("calm"), make_run("b", cpu=1.9))


def results(mismatches=()):
    """Two arms, reported."""
    runs = [make_run("base"), make_run("arm", bits=1900.0, parameters=1100, speeds=(50.0,) * 4)]
    manifest = Manifest(1, {}, {"name": "t"}, {}, "", {}, {}, {}, {"valid": VALID}, {})
    numbers = [collect.numbers(run, VALID) for run in runs]
    return report.Results(Settings(), {"torch": "2"}, manifest, runs, numbers, mismatches)


def test_the_table_is_aligned_with_the_baseline_first():
    """All lines are equally long; changes and ratios are against the first row."""
    lines = report.text(results()).split("\n\n")[0].splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "base (baseline)" in lines[2]
    assert "1.00x" in lines[2]
    for cell in ("-0.0693", "+100 (+10.00%)", "0.50x", "1 MiB"):
        assert f" {cell} |" in lines[3]


def test_the_report_says_what_is_not_comparable(tmp_path):
    """A mismatch that was allowed stands in the text, the report and the JSON."""
    report.write(results(["seed: differs"]), tmp_path)
    for text in (report.text(results(["seed: differs"])), (tmp_path / "report.md").read_text()):
        assert "not comparable: seed: differs." in text
    assert '"seed: differs"' in (tmp_path / "results.json").read_text()
