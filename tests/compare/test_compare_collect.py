"""Laws of ranking: equal facts or a refusal, and one definition of every number."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics

import pytest
from compare_setup import DATA, FACTS, SCHEMES, entry, job

from normplugin.compare import collect, fair, report, results, verdict
from normplugin.compare.cautions import cautions
from normplugin.compare.plan import Settings
from normplugin.compare.results import DIVERGED, FAILED, Results
from normplugin.diagnostics import records
from normplugin.diagnostics.records import BATCHES, Record
from normplugin.errors import CompareError

UPSTREAM = SCHEMES["upstream"]


def base(**numbers):
    """The baseline's run."""
    return entry(UPSTREAM, **numbers)


def found(**facts):
    """What differs between an arm with these facts and the baseline."""
    return collect.findings([base(), entry("periln", **facts)], Settings(), DATA)


def arms(*entries, **settings):
    """The numbers of these runs."""
    rates = tuple(sorted({e.job.lr for e in entries}))
    seeds = tuple(sorted({e.job.seed for e in entries}))
    return collect.arms(list(entries), Settings(lrs=rates, seeds=seeds, **settings), DATA)


def test_equal_facts_may_be_ranked():
    """No difference, no finding, no refusal; another learning rate is no difference."""
    assert found() == []
    assert found(**{"learning rate": [0.01]}) == []
    assert fair.refuse([], []) == []


@pytest.mark.parametrize("fact", ["data", "window", "log base", "trained tokens", "updates"])
def test_a_difference_names_its_field_both_values_and_the_run(fact):
    """Any single fact that differs is refused by name; allowed by name, it is a warning."""
    (finding,) = found(**{fact: 7})
    assert finding.text.startswith(f"{fact}: got 7 for 'periln lr 0.002 seed 1'; {FACTS[fact]} for")
    option = fact.replace(" ", "-")
    with pytest.raises(CompareError, match=rf"^{fact}: got 7 .*--allow-mismatch {option} "):
        fair.refuse([finding], ["dropout"])
    assert fair.refuse([finding], [option]) == [finding.text]


def test_a_seed_that_was_not_asked_for_is_found():
    """Even where all runs share it."""
    entries = [base(**{"seed": 1}), entry("periln", seed=1)]
    entries[1].done.record.facts["seed"] = 2
    (finding,) = collect.findings(entries, Settings(), DATA)
    assert finding.text == "seed: got 2 for 'periln lr 0.002 seed 1'; 1 was asked for"


def test_runs_of_other_seeds_had_other_batches():
    """Only runs of one seed are compared in their batches."""
    other = {"tokens per update": [[10.0, 2000.0]]}
    entries = [base(), base(seed=2, **other), entry("periln"), entry("periln", seed=2, **other)]
    assert collect.findings(entries, Settings(), DATA) == []


def test_a_missing_fact_is_a_difference():
    """A fact that only one of them recorded cannot be equal."""
    (finding,) = fair.compare([(job(), {}), (job("periln"), {"units": "nats"})])
    assert finding.text.startswith("units: got nats for 'periln lr 0.002 seed 1'; None for")


def test_other_tokens_per_update_name_the_first_update():
    """The log lines are compared one by one, and the first that differs is named."""
    other = [[10.0, 2048.0], [20.0, 4096.0], [30.0, 1.0]]
    (finding,) = found(**{"tokens per update": other})
    assert "got 4096.0 for 'periln" in finding.text
    assert finding.text.endswith("first at update 20")


def test_other_batches_name_the_first_update_and_unknown_ones_pass():
    """A hash that a resumed run does not have may be any; another one may not."""
    seen = [[1, 11.0], [20, 12.0], [40, 13.0]]
    assert fair.compare([(job(), {"batches": seen}), (job("periln"), {"batches": seen[:]})]) == []
    resumed = [[1, 11.0], [20, None], [40, 13.0]]
    assert fair.compare([(job(), {"batches": seen}), (job("periln"), {"batches": resumed})]) == []
    other = [[1, 11.0], [20, None], [40, 14.0]]
    (finding,) = fair.compare([(job(), {"batches": seen}), (job("periln"), {"batches": other})])
    assert finding.text.startswith("batches: got 14.0 for 'periln")
    assert finding.text.endswith("first at update 40")
    assert fair.compare([(job(), {"batches": seen}), (job("periln"), {"batches": seen[:2]})])
    tokens = "tokens per update"  # no other fact may be half known
    assert fair.compare([(job(), {tokens: seen}), (job("periln"), {tokens: resumed})])


def test_several_findings_are_counted():
    """The first is shown with the number of the others."""
    with pytest.raises(CompareError, match=re.escape("(1 more)")):
        fair.refuse(found(updates=2, window=64), [])


def test_parameters_that_no_formula_promises_are_found():
    """One more than the scheme adds to the baseline: an error."""
    entries = [base(), entry("normformer", more=1)]
    (finding,) = collect.findings(entries, Settings(), DATA)
    assert finding.text.startswith("parameters: got +5,137 for 'normformer' against the baseline")
    assert finding.text.endswith("its scheme adds +5,136")


def test_a_run_scored_on_part_of_the_validation_split_is_found():
    """Bits per byte need every token of the split, the eos of each document included."""
    entries = [base(), entry("periln")]
    short = [e.done.record.__dict__.update(scored=990) or e for e in entries]
    found = collect.findings(short, Settings(), DATA)
    assert [f.fact for f in found] == ["scored tokens"] * 2
    assert collect.findings(short, Settings(kind="mlm"), DATA) == []


def test_an_unknown_field_is_refused():
    """A slip in --allow-mismatch would otherwise allow nothing, and say so after hours."""
    fair.check_fields(["scored-tokens", "Seed"], ["scored tokens", "seed"])
    with pytest.raises(CompareError, match="Did you mean 'seed'"):
        fair.check_fields(["sed"], ["scored tokens", "seed"])


def test_the_loss_comes_in_nats_and_per_byte():
    """2,000 bits over 1,000 tokens and 3,000 bytes, by hand; nothing per byte of masked text."""
    (arm,) = arms(base(loss=2.0 * math.log(2.0)))
    assert arm.loss.mean == pytest.approx(2.0 * math.log(2.0), rel=1e-12)
    assert arm.bits_per_byte == pytest.approx(2.0 / 3.0, rel=1e-12)
    assert arm.token_perplexity == pytest.approx(4.0, rel=1e-12)
    assert arm.word_perplexity == pytest.approx(32.0, rel=1e-12)
    (masked,) = arms(base(), kind="mlm")
    assert (masked.bits_per_byte, masked.word_perplexity) == (None, None)


def test_best_against_best():
    """Each arm at the rate with its lowest mean loss; a rate that lost a seed does not count."""
    entries = [
        *(
            base(lr=lr, seed=s, loss=loss)
            for lr, loss in ((1e-3, 2.0), (3e-3, 1.9))
            for s in (1, 2)
        ),
        *(entry("periln", lr=1e-3, seed=s, loss=1.8) for s in (1, 2)),
        entry("periln", lr=3e-3, seed=1, loss=1.0),
        entry("periln", lr=3e-3, seed=2, status=DIVERGED),
    ]
    upstream, periln = arms(*entries)
    assert (upstream.best_lr, periln.best_lr) == (3e-3, 1e-3)
    assert (periln.loss.mean, periln.loss.n) == (1.8, 2)
    assert len(periln.runs) == 4


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((2.00, 2.01, 2.02), "baseline"),
        ((1.50, 1.51, 1.52), "better"),
        ((2.50, 2.51, 2.52), "worse"),
        ((1.90, 2.02, 2.05), "no difference shown"),
    ],
)
def test_verdicts_are_those_of_welchs_test(losses, expected):
    """Mean and sample standard deviation over the seeds, and what they show at 5 %."""
    name = UPSTREAM if expected == "baseline" else "periln"
    theirs = [base(seed=s, loss=x) for s, x in enumerate((2.00, 2.01, 2.02), 1)]
    ours = [entry("periln", seed=s, loss=x) for s, x in enumerate(losses, 1)]
    *_, arm = arms(*theirs, *(ours if name == "periln" else []))
    assert arm.verdict == expected
    assert arm.loss.std == pytest.approx(statistics.stdev(losses))
    assert (arm.p_value is None) == (expected == "baseline")


def test_one_seed_is_called_one_seed_and_nothing_is_tested_without_scipy(monkeypatch):
    """No verdict is made up."""
    assert [arm.verdict for arm in arms(base(), entry("periln"))] == ["baseline", "one seed"]
    monkeypatch.setattr(verdict, "can_test", lambda: False)
    assert verdict.verdict([1.0, 1.1], [2.0, 2.1]) == ("not tested", None)
    assert verdict.verdict([1.0, 1.0], [2.0, 2.0])[0] == "not tested"


def test_losses_without_spread_show_nothing():
    """Two seeds that give the same loss leave nothing to test against."""
    assert verdict.verdict([1.0, 1.0], [2.0, 2.0]) == ("no difference shown", None)


def test_a_failed_run_is_reported_and_never_ranked():
    """Its arm has no numbers and the verdict "failed"; the others are compared."""
    entries = [base(), entry("periln", status=FAILED), entry("normformer")]
    upstream, periln, normformer = arms(*entries)
    assert [arm.verdict for arm in (upstream, periln, normformer)] == [
        *("baseline", "failed", "one seed"),
    ]
    assert (periln.loss, periln.speed_ratio, periln.best_lr) == (None, None, None)
    said = " ".join(cautions([upstream, periln, normformer], Settings()))
    assert "periln at learning rate 0.002 with seed 1 failed at update 20: no memory." in said


def test_a_failed_baseline_ranks_nothing():
    """Without it there is nothing to be better than."""
    assert [arm.verdict for arm in arms(base(status=FAILED), entry("periln"))] == ["failed"] * 2


def test_losses_at_equal_updates_tokens_and_time():
    """An arm at half the speed has, at equal time, done half: the curve is read there."""
    fast, slow = arms(base(speed=100.0), entry("periln", speed=50.0))
    assert (fast.loss_at.updates, slow.loss_at.updates) == (2.0, 2.0)
    # 30 s: the fast one at its end, the slow one at update 15, between 10 and 20.
    assert fast.loss_at.seconds == 2.0
    assert slow.loss_at.seconds == pytest.approx((4.0 + 2.5) / 2)
    assert slow.speed_ratio == 0.5


def test_updates_and_seconds_to_the_baselines_loss():
    """Read off the arm's own curve, between two validations; None where it never gets there."""
    upstream, better = arms(base(loss=2.0), entry("periln", loss=1.5))
    assert upstream.updates_to_baseline_loss == 30
    # Its curve is 3.5, 2.0, 1.5 at 10, 20, 30.
    assert better.updates_to_baseline_loss == 20
    assert better.seconds_to_baseline_loss == 20.0
    assert arms(base(loss=2.0), entry("periln", loss=2.1))[1].updates_to_baseline_loss is None


def test_a_ramp_is_judged_by_the_updates_survived():
    """More is better, and the losses do not count."""
    entries = [base(seed=s, ramp=100 + s, status=DIVERGED) for s in (1, 2, 3)]
    entries += [entry("periln", seed=s, ramp=200 + s, status=DIVERGED) for s in (1, 2, 3)]
    upstream, periln = arms(*entries, ramp=True)
    assert (upstream.verdict, periln.verdict) == ("baseline", "better")


def test_a_ramp_is_of_the_same_batches_as_far_as_all_runs_went(tmp_path):
    """No run needs to end well for that; behind the shortest run nothing is compared."""

    def ran(arm, *numbers):
        it = entry(arm, ramp=100, status=DIVERGED)
        folder = tmp_path / arm
        found = [Record(10 * n, "", None, "run", BATCHES, x) for n, x in enumerate(numbers, 1)]
        records.append(folder / "diagnostics.jsonl", found)
        return dataclasses.replace(it, job=dataclasses.replace(it.job, folder=folder))

    ramp = Settings(lrs=(1.0,), ramp=True)
    runs = [ran("preln", 7, 8, 9), ran("periln", 7, None)]
    assert collect.findings(runs, ramp, DATA) == []
    (finding,) = collect.findings([*runs, ran("normformer", 7, 6)], ramp, DATA)
    assert finding.text.startswith("batches: got 6 for 'normformer lr 0.002 seed 1'; 8 for ")
    assert finding.text.endswith(", first at update 20")


def said(*entries, **settings):
    """The cautions of these runs, as one text."""
    rates = tuple(sorted({e.job.lr for e in entries}))
    seeds = tuple(sorted({e.job.seed for e in entries}))
    full = Settings(lrs=rates, seeds=seeds, **settings)
    return " ".join(cautions(collect.arms(list(entries), full, DATA), full))


def test_cautions_name_the_seed_and_the_sweep():
    """One seed and one rate are always named; a best rate at the end of a sweep too."""
    assert "one seed per arm: differences of this size are not a result" in said(base())
    assert "no sweep" in said(base())
    swept = said(base(lr=1e-3, loss=1.0), base(lr=2e-3, loss=2.0))
    assert "the best learning rate of upstream is at the end of the sweep" in swept


def test_one_caution_tells_every_seed_that_ended_the_same_way():
    """Three diverged seeds of an arm are one sentence, another rate is a second one."""
    gone = [entry("periln", seed=seed, lr=1e-2, status=DIVERGED) for seed in (1, 2, 3)]
    text = said(base(), *gone, entry("periln", lr=1e-1, status=DIVERGED))
    assert "periln at learning rate 0.01 with seeds 1, 2, 3 diverged at updates 20, 20, 20:" in text
    assert "periln at learning rate 0.1 with seed 1 diverged at update 20:" in text
    assert text.count("diverged") == 2


def test_speeds_of_a_busy_machine_are_marked():
    """Speed or CPU share moved by more than 10 %: the arm is named; a calm one is not."""
    calm, busy = base(), entry("periln")
    assert "other work" not in said(calm, busy)
    busy.done.run.__dict__.update(cpu_share=0.85)
    assert "other work during periln (" in said(calm, busy)
    busy.done.run.__dict__.update(cpu_share=1.0, quartiles=[90.0, 100.0, 120.0])
    assert "other work during periln (" in said(calm, busy)


def whole(mismatches=()):
    """Three arms, reported."""
    found = arms(base(), entry("normformer", loss=1.9, speed=50.0), entry("periln", status=FAILED))
    return Results(
        schema=results.SCHEMA,
        title="normformer against fairseq's own model",
        settings={"updates": 30, "batch": 16, "window": 128, "seeds": [1], "lrs": [2e-3]}
        | {"framework": "fairseq", "device": "cpu"},
        versions={"torch": "2"},
        machine={"system": "Linux"},
        data={"name": "t", "valid": {"tokens": 1000, "bytes": 3000}},
        facts={"window": 128},
        baseline="upstream",
        arms=found,
        mismatches=list(mismatches),
        cautions=cautions(found, Settings()),
    )


def test_results_are_read_as_they_were_written(tmp_path):
    """Every dataclass, list and None comes back."""
    results.write(whole(), tmp_path)
    assert results.read(tmp_path / results.NAME) == whole()


@pytest.mark.parametrize("schema", [0, 2, None])
def test_results_of_another_schema_are_refused(tmp_path, schema):
    """In one sentence that names both versions; so is what is no results at all."""
    results.write(whole(), tmp_path)
    path = tmp_path / results.NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": schema}))
    with pytest.raises(CompareError, match=f"got results of schema {schema}; this version reads 1"):
        results.read(path)
    for broken in ("{", "[]", '{"schema": 1}'):
        path.write_text(broken)
        with pytest.raises(CompareError, match="cannot be read as results"):
            results.read(path)


def test_the_table_is_aligned_with_the_baseline_first():
    """All lines are equally long; changes and ratios are against the first row."""
    lines = report.text(whole()).split("\n\n")[0].splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].startswith("| upstream ") and "1.00x" in lines[2]
    for cell in ("one seed", "-0.1000", "6,136 (+5,136)", "0.50x"):
        assert f" {cell} |" in lines[3]
    assert " failed |" in lines[4]


def test_the_report_says_what_is_not_comparable(tmp_path):
    """A mismatch that was allowed stands in the text, the report and the JSON."""
    found = whole(["seed: differs"])
    report.write(found, tmp_path)
    for text in (report.text(found), (tmp_path / "report.md").read_text()):
        assert "not comparable: seed: differs." in text
    assert '"seed: differs"' in (tmp_path / "results.json").read_text()
    report.remove(tmp_path)
    assert not list(tmp_path.iterdir())
