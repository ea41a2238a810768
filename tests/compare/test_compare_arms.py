"""Laws of ``--arms``: one spelling for schemes, options and the trainer's own options."""

from __future__ import annotations

import re

import pytest

from normplugin.compare.arms import parse
from normplugin.errors import CompareError


def named(*words):
    """Name -> (scheme, options) of the arms but the baseline."""
    first, *others = parse(words)
    assert (first.name, first.placement, first.options) == ("upstream", None, ())
    return {arm.name: (arm.placement.name, arm.options) for arm in others}


def test_arms_are_separated_by_commas_or_blanks_and_upstream_comes_first():
    """The baseline is there without being named, and once if it is."""
    expected = {"preln": ("preln", ()), "A+C": ("A+C", ()), "periln": ("periln", ())}
    assert named("preln,A+C", "periln") == expected
    assert named("preln, A+C,upstream,periln") == expected


@pytest.mark.parametrize(
    ("name", "scheme", "options"),
    [
        ("normformer+residual-scale", "normformer", ("--residual-scale",)),
        ("c+a+qk-norm=head", "A+C", ("--qk-norm", "head")),
        ("A+B+C", "A+B+C", ()),
        ("periln+norm-eps=1e-6+dropout=0.1", "periln", ("--norm-eps", "1e-6", "--dropout", "0.1")),
        ("preln+adam-betas=(0.9, 0.95)", "preln", ("--adam-betas", "(0.9, 0.95)")),
        ("preln+weight-decay=1e+3", "preln", ("--weight-decay", "1e+3")),
    ],
)
def test_options_follow_a_plus(name, scheme, options):
    """Letters, values, and commas and plus signs inside values are told apart."""
    assert named(name) == {name: (scheme, options)}


def test_a_placement_has_the_options_of_its_arm():
    """What is promised later is what was asked for here."""
    _, arm = parse(["normformer+residual-scale+norm-type=rmsnorm"])
    assert arm.placement.residual_scale and arm.placement.norm.type == "rmsnorm"


def test_a_baseline_with_options_is_another_arm():
    """Upstream's model with an option of the trainer, beside the baseline without it."""
    first, second = parse(["upstream+dropout=0.1"])
    assert (first.name, second.name) == ("upstream", "upstream+dropout=0.1")
    assert second.upstream and second.options == ("--dropout", "0.1")


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("normfomer", "got 'normfomer'; legal are upstream, preln"),
        ("normfomer", "Did you mean 'normformer'?"),
        ("normformer+residual-scal", "Did you mean 'residual-scale'?"),
        ("normformer+residual-scale=1", "residual-scale takes no value"),
        ("periln+norm-type", "Write +norm-type=VALUE"),
        ("periln+norm-type=foo", "legal are layernorm, rmsnorm"),
        ("preln+output-norm-init=0.5", "has no output norm"),
        ("upstream+residual-scale", "Write preln+residual-scale"),
        ("preln,preln", "got 'preln' twice"),
        ("preln,PreLN", "twice"),
    ],
)
def test_what_is_no_arm_is_refused(arm, message):
    """Unknown schemes and options, values out of place, the same arm twice: by name."""
    with pytest.raises(CompareError, match=re.escape(message)):
        parse([arm])
