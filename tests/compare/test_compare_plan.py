"""Laws of the plan: settings within bounds, a folder that is ours or new, one tool in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from compare_setup import SCHEMES, job

from normplugin.compare import fairseq_arms, folder, plan
from normplugin.compare.arms import parse
from normplugin.compare.plan import Job, Settings
from normplugin.errors import CompareError
from normplugin.placement import Dims


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"updates": 1}, "--updates: got 1; legal is an integer >= 2"),
        ({"seeds": (0,)}, "--seeds: got 0; legal is integers >= 1"),
        ({"seeds": (1, 1)}, "--seeds: got (1, 1); legal is each value once"),
        ({"lrs": (0.0,)}, "--lr: got 0.0; legal is 0 < value < 1"),
        ({"lrs": (1.0,)}, "--lr: got 1.0; legal is 0 < value < 1"),
        ({"threads": 0}, "--threads: got 0"),
        ({"size": "tinny"}, "Did you mean 'tiny'?"),
        ({"size": "12x64"}, "or LAYERSxWIDTHxHEADS (12x64x2)"),
        ({"size": "12x64x3"}, "legal is a width that the heads divide"),
        ({"validations": 0}, "--validations: got 0"),
        ({"kind": "mlm", "size": "125m"}, "legal are base, large, tiny"),
        ({"framework": "megatron", "kind": "mlm"}, "got mlm with --framework megatron"),
        ({"tp": 2, "nproc": 2}, "with --framework fairseq; legal is 1 process"),
        ({"framework": "megatron", "nproc": 3, "tp": 2}, "tp x pp must divide it"),
        ({"framework": "megatron", "nproc": 3}, "and the rest the batch"),
    ],
)
def test_settings_out_of_bounds_are_refused(wrong, message):
    """The message names the option and the legal values."""
    with pytest.raises(CompareError, match=re.escape(message)):
        Settings(**wrong)


@pytest.mark.parametrize("updates", [2, 6, 40, 300, 305, 12_345])
def test_a_run_is_validated_about_ten_times(updates):
    """At places where the log has a line; some log intervals hold no validation."""
    settings = Settings(updates=updates)
    log, valid = settings.log_interval, settings.valid_interval
    assert valid % log == 0 and valid >= 2 * log
    assert updates / valid <= 10
    assert updates < 100 or updates / valid > 7


def test_validations_may_be_few():
    """Scoring the text is most of a short run's work."""
    assert Settings(updates=300, validations=2).valid_interval == 150
    assert Settings(updates=300, validations=1).valid_interval == 300


@pytest.mark.parametrize("kind", ["lm", "mlm", "mt"])
def test_a_free_size_is_every_arms(kind):
    """Layers, width and heads of the words; FFNs are four times as wide; upstream has the same."""
    settings = Settings(size="12x64x2", kind=kind)
    assert settings.dims() == Dims(12, 64, 256, 2)
    side = "encoder" if kind == "mlm" else "decoder"
    sizes = [f"--{side}-layers", "12", f"--{side}-embed-dim", "64"]
    for arm in parse(["normformer", "A+C"]):
        words = fairseq_arms._arch(Job(arm, 2e-3, 1, Path()), settings)
        place = words.index(sizes[0])
        assert words[place : place + 4] == sizes


def test_jobs_cover_arms_rates_and_seeds(tmp_path):
    """Each in a folder of its own, all arms of a seed before the next seed."""
    settings = Settings(lrs=(1e-3, 3e-3), seeds=(1, 2))
    jobs = list(plan.jobs([*SCHEMES.values()], settings, tmp_path))
    assert len({it.folder for it in jobs}) == len(jobs) == 16
    assert [it.seed for it in jobs] == [1] * 8 + [2] * 8


def test_promised_parameters_follow_the_formula():
    """By hand: what NormFormer adds per layer; per stack, and in cross-attention, of pairs."""
    extra = 2 * 128 + 2 * 512 + 4
    assert Settings().promised_parameters(job("normformer").arm) == 4 * extra
    pairs = Settings(kind="mt").promised_parameters(job("normformer").arm)
    assert pairs == 4 * extra + 4 * (extra + 2 * 128 + 4)
    assert Settings().promised_parameters(SCHEMES["upstream"]) == 0


def test_a_folder_of_something_else_is_refused(tmp_path):
    """A folder with foreign files, and a file, are left alone; a new and an empty one serve."""
    folder.check_out(tmp_path / "new")
    folder.check_out(tmp_path)
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(CompareError, match="holds something else"):
            folder.check_out(path)


def test_one_comparison_at_a_time_in_a_folder(tmp_path):
    """While one is at work the second is refused; afterwards the folder is known as ours."""
    out = tmp_path / "out"
    with folder.workspace(out):
        folder.begin(out)
        with pytest.raises(CompareError, match="another comparison is at work"):
            with folder.workspace(out):
                pass
    (out / "file").write_text("anything")
    with folder.workspace(out):
        pass


def test_another_comparison_does_not_take_a_folder(tmp_path):
    """The option that differs is named; --force replaces the plan."""
    folder.begin(tmp_path)
    folder.claim(tmp_path, {"--updates": 6, "--extra": ()}, replace=False)
    folder.claim(tmp_path, {"--updates": 6, "--extra": []}, replace=False)
    with pytest.raises(CompareError, match="with other --updates is kept"):
        folder.claim(tmp_path, {"--updates": 7, "--extra": ()}, replace=False)
    folder.claim(tmp_path, {"--updates": 7, "--extra": ()}, replace=True)


def test_no_space_is_one_sentence(tmp_path):
    """An error of the operating system while writing names the folder and what to do."""
    with pytest.raises(CompareError, match=r"No space left on device.*goes on where"):
        with folder.workspace(tmp_path):
            raise OSError(28, "No space left on device")


def test_a_path_that_fairseq_would_cut_is_refused(tmp_path):
    """fairseq splits paths at the path separator."""
    with pytest.raises(CompareError, match="cuts a path"):
        folder.check_out(tmp_path / "a:b")


def test_files_are_written_completely_or_not_at_all(tmp_path):
    """What cannot be written leaves the old file and nothing beside it."""
    path = tmp_path / "result.json"
    folder.write_json(path, {"a": 1})
    for broken in (object(), float("nan")):
        with pytest.raises((TypeError, ValueError)):
            folder.write_json(path, {"a": broken})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [it.name for it in tmp_path.iterdir()] == ["result.json"]


def test_identities_differ_by_name():
    """Tuples equal lists, as in JSON; a name on one side only is a difference."""
    assert folder.differences({"a": (1, 2), "b": 1}, {"a": [1, 2], "b": 2, "c": 0}) == ["b", "c"]
