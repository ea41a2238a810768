"""Laws of the plan: arms in order, settings within bounds, a folder that is ours or new."""

from __future__ import annotations

import json
import re

import pytest

from normplugin.compare import plan
from normplugin.compare.plan import Settings, split_arms
from normplugin.errors import CompareError


def test_the_baseline_comes_first_and_once():
    """A baseline named among the arms is moved to the front, not trained twice."""
    arms = split_arms(["a_tiny", "base", "preln_tiny --norm-scheme A+C"], "base")
    assert arms == [
        ("base", "base", ()),
        ("a_tiny", "a_tiny", ()),
        ("preln_tiny --norm-scheme A+C", "preln_tiny", ("--norm-scheme", "A+C")),
    ]


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        (["a", "a"], "got 'a' twice"),
        (["a --x 1", "a   --x 1"], "got 'a --x 1' twice"),
        (["base", "base"], "got 'base' twice"),
        (["data"], "got 'data'; legal is ARCH"),
        (["--lr 1"], "got '--lr 1'; legal is ARCH"),
        ([""], "got ''; legal is ARCH"),
        (["a --x 'b"], "No closing quotation"),
    ],
)
def test_an_arm_that_cannot_be_told_apart_is_refused(arms, message):
    """Twice the same, no architecture or an open quote: refused by name."""
    with pytest.raises(CompareError, match=re.escape(message)):
        split_arms(arms, "base")


def test_folder_names_are_plain_and_tell_options_apart():
    """An arm's options are in its folder's name; separators and blanks are not."""
    assert plan.folder_name("preln_tiny --norm-scheme A+C") == "preln_tiny_norm-scheme_A+C"
    assert "/" not in plan.folder_name("a --restore-file ../../b")


@pytest.mark.parametrize(
    "wrong", [{"updates": 1}, {"seed": 0}, {"lr": 0.0}, {"lr": 1.0}, {"threads": 0}]
)
def test_settings_out_of_bounds_are_refused(wrong):
    """The message names the option and the legal values."""
    with pytest.raises(CompareError, match=rf"--{next(iter(wrong))}: got .*; legal is "):
        Settings(**wrong)


def test_a_folder_of_something_else_is_refused(tmp_path):
    """A folder with foreign files, and a file, are left alone; a new and an empty one serve."""
    plan.check_out(tmp_path / "new")
    plan.check_out(tmp_path)
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(CompareError, match="holds something else"):
            plan.check_out(path)


def test_one_comparison_at_a_time_in_a_folder(tmp_path):
    """While one is at work the second is refused; afterwards the folder is known as ours."""
    out = tmp_path / "out"
    with plan.workspace(out):
        with pytest.raises(CompareError, match="another comparison is at work"):
            with plan.workspace(out):
                pass
    (out / "file").write_text("anything")
    with plan.workspace(out):
        pass


def test_a_path_that_fairseq_would_cut_is_refused(tmp_path):
    """fairseq splits paths at the path separator."""
    with pytest.raises(CompareError, match="cuts a path"):
        plan.check_out(tmp_path / "a:b")


def test_files_are_written_completely_or_not_at_all(tmp_path):
    """What cannot be written leaves the old file and nothing beside it."""
    path = tmp_path / "result.json"
    plan.write_json(path, {"a": 1})
    for broken in (object(), float("nan")):
        with pytest.raises((TypeError, ValueError)):
            plan.write_json(path, {"a": broken})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [it.name for it in tmp_path.iterdir()] == ["result.json"]


def test_identities_differ_by_name():
    """Tuples equal lists, as in JSON; a name on one side only is a difference."""
    assert plan.differences({"a": (1, 2), "b": 1}, {"a": [1, 2], "b": 2, "c": 0}) == ["b", "c"]
