"""Laws of reading a run: a real log and checkpoint say what was trained; gaps are refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from compare_setup import nats

from normplugin.compare import fairseq_record, megatron_record
from normplugin.compare.frameworks import LOG as LOG_NAME
from normplugin.compare.record import Score, Step, trace
from normplugin.errors import CompareError, DataError

torch = pytest.importorskip("torch")
RECORDED = Path(__file__).parent / "recorded"
LOG = (RECORDED / "normformer_tiny.log").read_text(encoding="utf-8")
MEGATRON = (RECORDED / "megatron_tiny.log").read_text(encoding="utf-8")
TOKENS = 2439
EMPTY = trace([])


def meter(total, tokens):
    """fairseq's saved loss meter."""
    state = {"val": None, "sum": torch.tensor(total), "count": tokens, "round": 3}
    return [(10, "loss", "AverageMeter", state)]


def state(data, updates, valid):
    """fairseq's checkpoint, reduced."""
    return {
        "cfg": {
            "task": {"data": str(data / "fairseq"), "tokens_per_sample": 128},
            "common": {"seed": 1},
            "optimization": {"lr": [0.002], "update_freq": (1,)},
        },
        "optimizer_history": [{"num_updates": updates}],
        "extra_state": {
            "train_iterator": {"epoch": 1, "iterations_in_epoch": updates},
            "metrics": {"valid": valid},
        },
    }


@pytest.fixture
def folder(tmp_path, data):
    """A run's folder: the recorded log, and a checkpoint of the same run."""
    logged = float(re.search(r'"valid_loss": "([\d.]+)"', LOG)[1])
    found = state(data, 6, meter(logged * TOKENS, TOKENS))
    torch.save(found, tmp_path / fairseq_record.CHECKPOINT)
    (tmp_path / LOG_NAME).write_text(LOG, encoding="utf-8")
    return tmp_path


def test_a_run_says_what_it_was(folder):
    """Model, scheme, parameters, tokens and updates, from the log and the checkpoint."""
    record = fairseq_record.read(folder, trace(fairseq_record.events(LOG)))
    assert (record.model, record.parameters) == ("NormLanguageModel", 836_880)
    assert record.scheme == "normformer"
    facts = record.facts
    assert (facts["seed"], facts["window"], facts["updates"]) == (1, 128, 6)
    assert (facts["vocabulary"], facts["trained tokens"]) == ([300], 5 * 2048 + 2036)
    assert (facts["scored tokens"], facts["place in the data"]) == (TOKENS, [1, 6])
    assert [update for update, _ in facts["tokens per update"]] == [1, 2, 3, 4, 5, 6]
    assert facts["learning rate"] == [0.002]
    assert record.loss == pytest.approx(nats(5.227), rel=1e-6)


def test_the_last_of_several_validations_is_taken_off_the_sum(folder, data):
    """fairseq's meter sums up all of them; the checkpoint before says what came earlier."""
    before = 6.0 * TOKENS
    logged = 5.2272 * TOKENS
    torch.save(state(data, 4, meter(before, TOKENS)), folder / "checkpoint_1_4.pt")
    last = state(data, 6, meter(before + logged, 2 * TOKENS))
    torch.save(last, folder / fairseq_record.CHECKPOINT)
    record = fairseq_record.read(folder, EMPTY)
    assert record.loss == pytest.approx(nats(5.2272), rel=1e-6)
    assert record.scored == TOKENS


def test_another_base_of_the_logarithm_is_another_fact(folder):
    """The same numbers with the perplexity of base e: the record knows, and the loss is nats."""
    two = fairseq_record.read(folder, EMPTY)
    text = LOG.replace('"valid_ppl": "37.44"', f'"valid_ppl": "{math.exp(5.227):.2f}"')
    (folder / LOG_NAME).write_text(text, encoding="utf-8")
    natural = fairseq_record.read(folder, EMPTY)
    assert (two.facts["log base"], natural.facts["log base"]) == (2.0, math.e)
    assert natural.loss == pytest.approx(5.227)


@pytest.mark.parametrize("part", ["dictionary: ", " model: ", "num. trained: "])
def test_a_log_without_its_facts_is_refused(folder, part):
    """Each line that facts are read from must be there."""
    (folder / LOG_NAME).write_text(LOG.replace(part, "?"), encoding="utf-8")
    with pytest.raises(CompareError, match="got a log without"):
        fairseq_record.read(folder, EMPTY)


@pytest.mark.parametrize("loss", ["nan", "9.999"])
def test_a_loss_that_the_log_does_not_confirm_is_refused(folder, loss):
    """Checkpoint and log must agree on one finite validation loss."""
    text = re.sub(r'"valid_loss": "[\d.]+"', f'"valid_loss": "{loss}"', LOG)
    (folder / LOG_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(CompareError, match="validation loss"):
        fairseq_record.read(folder, EMPTY)


def test_a_truncated_log_is_refused(folder):
    """Cut before the validation, it does not confirm the checkpoint."""
    (folder / LOG_NAME).write_text(LOG.partition("begin validation")[0], encoding="utf-8")
    with pytest.raises(CompareError, match=r"train\.log: got a log without a validation; fairseq"):
        fairseq_record.read(folder, EMPTY)


def test_no_checkpoint_is_refused(folder):
    """A trainer that ended well without one was told not to write it."""
    (folder / fairseq_record.CHECKPOINT).unlink()
    with pytest.raises(CompareError, match="got no file"):
        fairseq_record.read(folder, EMPTY)


def test_a_checkpoint_that_a_kill_cut_short_is_replaced(folder, data):
    """fairseq copies its newest checkpoint to the name it resumes from."""
    last = folder / fairseq_record.CHECKPOINT
    torch.save(state(data, 4, meter(1.0, 1)), folder / "checkpoint_1_4.pt")
    whole = (folder / "checkpoint_1_4.pt").read_bytes()
    last.write_bytes(whole[: len(whole) // 2])
    fairseq_record.mend(folder)
    assert last.read_bytes() == whole
    assert fairseq_record.done(folder) == 4


def test_data_without_a_manifest_is_refused(tmp_path):
    """What was trained on must still say what it is."""
    with pytest.raises(DataError, match="normplugin prepare"):
        fairseq_record.settings_facts({"task": {"data": str(tmp_path)}})


def test_curves_count_what_was_done_twice_once():
    """A resumed log repeats updates; a line that holds a validation takes the usual time."""
    events = [
        *(Step(1, 10.0, 1.0, 9.0), Step(2, 10.0, 1.0, 8.0), Score(2, 7.5)),
        *(Step(3, 10.0, None, 7.0), Step(4, 10.0, 1.0, 6.5)),
        *(Step(3, 10.0, None, 7.0), Step(4, 10.0, 1.0, 6.0), Score(4, 5.0), Score(6, 4.0)),
    ]
    curves = trace(events)
    assert [(p.update, p.tokens, p.seconds, p.loss) for p in curves.train] == [
        *((1, 10, 1.0, 9.0), (2, 20, 2.0, 8.0), (3, 30, 3.0, 7.0), (4, 40, 4.0, 6.0)),
    ]
    assert [(p.update, p.tokens, p.seconds) for p in curves.valid] == [
        *((2, 20, 2.0), (4, 40, 4.0), (6, 60, 6.0)),
    ]


def test_speeds_skip_the_warm_up():
    """20 lines, the first 5 ten times slower: only the other 15 are measured."""
    events = [Step(i + 1, 100.0, 1.0 if i < 5 else 0.1, 5.0) for i in range(20)]
    assert trace(events).tokens_per_second == [1000.0] * 15


def test_fairseqs_time_behind_a_validation_is_not_training_alone():
    """The first line has no speed, the one behind a validation has another work in it."""
    behind = '2026 | INFO | train_inner | {"loss": "5", "ppl": "32", "wps": "1", "wpb": "2048", '
    log = f'{LOG}{behind}"num_updates": "7"}}\n'
    steps = [event for event in fairseq_record.events(log) if isinstance(event, Step)]
    assert [step.seconds is None for step in steps] == [True, *[False] * 5, True]
    assert steps[1].seconds == pytest.approx(2036 / 4280.6)
    assert steps[1].loss == pytest.approx(nats(9.171))


def test_fairseqs_lines_are_read_with_any_log_format():
    """Another set-up of logging, as by a library that came first, changes the separators only."""
    other = re.sub(r"^[\d :-]+\| INFO \| (\S+) \| ", r"INFO:\1:", LOG, flags=re.MULTILINE)
    assert fairseq_record.events(other) == fairseq_record.events(LOG)


def test_megatrons_log_says_what_a_run_was():
    """Losses, times and tokens per update, the arguments in force, the base of the logarithm."""
    curves = trace(megatron_record.events(MEGATRON))
    assert [p.update for p in curves.valid] == [2, 4, 6]
    assert curves.valid[-1].loss == pytest.approx(4.765544)
    assert curves.train[-1].tokens == 6 * 16 * 128
    options = megatron_record._arguments(MEGATRON)
    facts = megatron_record.settings_facts(options)
    assert (facts["window"], facts["seed"], facts["layers"]) == ("128", "1", "4")
    assert options["norm_scheme"] == "normformer"
    assert megatron_record._base(MEGATRON) == math.e


def test_megatron_leaves_out_a_loss_that_is_no_number():
    """Its line then has none: the step counts as one."""
    text = MEGATRON.replace(" lm loss: 4.897488E+00 |", "")
    assert math.isnan(megatron_record.events(text)[-2].loss)
