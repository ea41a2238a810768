"""Laws of reading a run: a real log and checkpoint say what was trained; gaps are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from normplugin.compare import fairseq_record, run
from normplugin.compare.plan import Arm
from normplugin.errors import CompareError

torch = pytest.importorskip("torch")
LOG = (Path(__file__).parent / "recorded" / "normformer_tiny.log").read_text(encoding="utf-8")
TOKENS = 2439


def meter(bits, tokens):
    """fairseq's saved loss meter."""
    state = {"val": None, "sum": torch.tensor(bits), "count": tokens, "round": 3}
    return [(10, "loss", "AverageMeter", state)]


@pytest.fixture
def folder(tmp_path):
    """A run's folder: the recorded log, and a checkpoint of the same run, reduced."""
    logged = float(re.search(r'"valid_loss": "([\d.]+)"', LOG)[1])
    for name in ("dict.txt", "train.bin", "train.idx", "valid.bin", "valid.idx"):
        (tmp_path / name).write_bytes(name.encode())
    state = {
        "cfg": {
            "task": {"data": str(tmp_path), "tokens_per_sample": 128},
            "common": {"seed": 1},
            "optimization": {"lr": [0.002], "update_freq": (1,)},
        },
        "optimizer_history": [{"num_updates": 6}],
        "extra_state": {
            "train_iterator": {"epoch": 1, "iterations_in_epoch": 6},
            "metrics": {
                "default": meter(1.0, 6 * 2046),
                "valid": meter(logged * TOKENS, TOKENS),
            },
        },
    }
    torch.save(state, tmp_path / fairseq_record.CHECKPOINT)
    (tmp_path / fairseq_record.LOG).write_text(LOG, encoding="utf-8")
    return tmp_path


def test_a_run_says_what_it_was(folder):
    """Model, scheme, parameters, tokens and updates, from the log and the checkpoint."""
    record = fairseq_record.read(folder)
    assert (record.model, record.parameters) == ("NormLanguageModel", 836_880)
    assert record.scheme["name"] == "normformer"
    assert re.fullmatch("[0-9a-f]{16}", record.scheme["architecture_hash"])
    facts = record.facts
    assert (facts["seed"], facts["window"], facts["updates"]) == (1, 128, 6)
    assert (facts["vocabulary"], facts["trained tokens"]) == (300, 12_276)
    assert (facts["scored tokens"], facts["place in the data"]) == (TOKENS, [1, 6])
    assert [update for update, _ in facts["tokens per update"]] == [1, 2, 3, 4, 5, 6]
    assert record.hyperparameters["learning rate"] == [0.002]


def test_other_data_is_another_fact(folder):
    """The data is known by its bytes, not by its path."""
    before = fairseq_record.read(folder).facts["data"]
    (folder / "valid.bin").write_bytes(b"other")
    assert fairseq_record.read(folder).facts["data"] != before


@pytest.mark.parametrize("part", ["dictionary: ", " model: ", "num. trained: "])
def test_a_log_without_its_facts_is_refused(folder, part):
    """Each line that facts are read from must be there."""
    (folder / fairseq_record.LOG).write_text(LOG.replace(part, "?"), encoding="utf-8")
    with pytest.raises(CompareError, match="got a log without"):
        fairseq_record.read(folder)


@pytest.mark.parametrize("loss", ["nan", "9.999"])
def test_a_loss_that_the_log_does_not_confirm_is_refused(folder, loss):
    """Checkpoint and log must agree on one finite validation loss."""
    text = re.sub(r'"valid_loss": "[\d.]+"', f'"valid_loss": "{loss}"', LOG)
    (folder / fairseq_record.LOG).write_text(text, encoding="utf-8")
    with pytest.raises(CompareError, match="validation loss"):
        fairseq_record.read(folder)


def test_no_checkpoint_is_refused(folder):
    """A trainer that ended well without one was told not to write it."""
    (folder / fairseq_record.CHECKPOINT).unlink()
    with pytest.raises(CompareError, match="got no file"):
        fairseq_record.read(folder)


def test_data_of_another_framework_is_refused(tmp_path):
    """Without fairseq's files there is nothing to train on; the message says how to get them."""
    with pytest.raises(CompareError, match="normplugin prepare --frameworks fairseq"):
        fairseq_record.settings_facts({"task": {"data": str(tmp_path)}})


def test_the_model_must_be_the_one_that_was_asked_for(folder):
    """Ours must log its scheme, upstream's must not, and the class must be the promised one."""
    record = fairseq_record.read(folder)
    run.check_model(Arm("n", "normformer_tiny", (), False, "NormLanguageModel"), record)
    with pytest.raises(CompareError, match="got model NormLanguageModel; Transformer"):
        run.check_model(Arm("t", "transformer_lm_gpt", (), True, "Transformer"), record)
    with pytest.raises(CompareError, match="got normformer in its log; none must be"):
        run.check_model(Arm("t", "transformer_lm_gpt", (), True, "NormLanguageModel"), record)


def test_progress_is_the_newest_interval():
    """The bar follows the last complete line."""
    assert fairseq_record.progress(LOG)["updates"] == 6
    assert fairseq_record.progress(LOG.partition('"num_updates": "2"')[0])["updates"] == 1
    assert fairseq_record.progress("nothing yet") is None
