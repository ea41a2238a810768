"""Our options beside Megatron's: what is refused, and what Megatron's parser is given."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys

import pytest
from megatron_trainer import ENTRY, LAUNCH, environment

from normplugin.errors import SchemeError
from normplugin.megatron_plugin import arguments, cpu_emulation
from normplugin.megatron_plugin.arguments import (
    CHOSEN_SPEC,
    add_norm_arguments,
    megatron_flags,
    scheme_from_args,
    split_options,
)
from normplugin.placement import resolve_scheme

SPEC = ["--spec", *CHOSEN_SPEC]


def flags(line: str) -> tuple[list[str], list[str]]:
    """Split a command line; return what is added for Megatron, and the words left to it."""
    ours, rest = split_options(line.split())
    return megatron_flags(ours, rest), rest


def megatron_args(**given) -> argparse.Namespace:
    """Megatron's parsed arguments, as far as a scheme reads them."""
    own = {
        "normalization": "LayerNorm",
        "layernorm_epsilon": 1e-5,
        "layernorm_zero_centered_gamma": False,
        "qk_layernorm": False,
        "multi_latent_attention": False,
    }
    return argparse.Namespace(**{**own, **dict.fromkeys(arguments.NAMES), **given})


@pytest.mark.parametrize(
    ("line", "added", "left"),
    [
        ("--lr 1 --norm-scheme periln x", SPEC, "--lr 1 x"),
        ("--norm-scheme b+a --norm-type rmsnorm", [*SPEC, "--normalization", "RMSNorm"], ""),
        ("--norm-scheme=preln --norm-eps 1e-6", [*SPEC, "--norm-epsilon", "1e-06"], ""),
        ("--norm-scheme preln --norm-zero-centered", [*SPEC, "--apply-layernorm-1p"], ""),
        ("--norm-scheme preln --qk-norm head", [*SPEC, "--qk-layernorm"], ""),
        ("--spec normplugin.megatron_plugin.specs A_C --lr 1", SPEC, "--lr 1"),
        ("--spec my.module mine", [], "--spec my.module mine"),
        ("--lr 1", [], "--lr 1"),
        # The same value twice is no contradiction.
        (
            "--norm-scheme preln --norm-eps 1e-6 --norm-epsilon 0.000001",
            SPEC,
            "--norm-epsilon 0.000001",
        ),
    ],
)
def test_what_megatron_is_given(line, added, left):
    """Our options are taken off, and Megatron's own names are added for what they mean."""
    assert flags(line) == (added, left.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--norm-scheme perilm", r"--norm-scheme: got 'perilm'; legal are .*Did you mean 'periln'"),
        ("--norm-scheme", r"--norm-scheme: expected one argument\. Give it one, or drop it\."),
        ("--norm-scheme preln --head-scale left", r"--head-scale: got 'left'; legal are none, "),
        ("--norm-scheme preln --norm-eps big", r"--norm-eps: got 'big'; legal are finite numbers"),
        ("--norm-scheme preln --output-norm-init 0.5", r"'preln' has no output norm"),
        ("--head-scale none", r"--head-scale: got it without a scheme; .*Add --norm-scheme NAME"),
        ("--norm-scheme periln --spec a b", r"got 'periln' with --spec a b; both choose the layer"),
        (
            "--norm-scheme preln --norm-type rmsnorm --normalization LayerNorm",
            r"--norm-type: got 'rmsnorm' with --normalization LayerNorm; both set the same thing",
        ),
        (
            "--norm-scheme preln --norm-eps 1e-6 --norm-epsilon 1e-5",
            r"--norm-eps: got '1e-6' with --norm-epsilon 1e-5; both set the same thing",
        ),
        ("--norm-scheme preln --qk-norm none --qk-layernorm", r"--qk-norm: got 'none' with --qk-l"),
        ("--spec normplugin.megatron_plugin.specs Z", r"--norm-scheme: got 'Z'; legal are"),
    ],
)
def test_bad_input_is_refused(line, message):
    """An unknown value, a contradiction or an option without effect: one sentence."""
    with pytest.raises(SchemeError, match=message):
        flags(line)


def test_a_name_clash_with_the_script_is_named():
    """A parser that has one of our names is refused, by option and by destination."""
    for clash in (["--qk-norm"], ["--other", "--head-scale"]):
        parser = argparse.ArgumentParser()
        parser.add_argument(*clash)
        with pytest.raises(SchemeError, match=f"{clash[-1]}: got an option of this name"):
            add_norm_arguments(parser)
    parser = argparse.ArgumentParser()
    parser.add_argument("--renamed", dest="norm_eps")
    with pytest.raises(SchemeError, match="--norm-eps: got an option of this name"):
        add_norm_arguments(parser)


def test_the_norm_is_megatrons_own():
    """Type, eps and gain are read from Megatron's options, the rest from ours."""
    args = megatron_args(
        norm_scheme="normformer",
        residual_scale=True,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        qk_layernorm=True,
    )
    expected = resolve_scheme(
        "normformer", residual_scale=True, norm_type="rmsnorm", norm_eps=1e-6, qk_norm="head"
    )
    assert scheme_from_args(args) == expected
    with pytest.raises(SchemeError, match="--normalization: got 'L2Norm'; legal are LayerNorm"):
        scheme_from_args(megatron_args(norm_scheme="preln", normalization="L2Norm"))


def test_the_emulation_adds_only_what_the_user_has_not_given():
    """A flag of the user's wins over the emulation's default, in either spelling."""
    added = cpu_emulation.default_flags(["--num-workers=2", "--eval-interval", "5"])
    assert not {"--num-workers", "--eval-interval"} & set(added)
    assert added[added.index("--distributed-backend") + 1] == "gloo"


@pytest.mark.parametrize(
    ("module", "line", "message"),
    [
        (ENTRY, "--norm-scheme perilm", "--norm-scheme: got 'perilm'"),
        (ENTRY, "--cpu-emulation --norm-scheme preln --qk-norm nil", "--qk-norm: got 'nil'"),
        (LAUNCH, "missing.py --norm-scheme preln", "SCRIPT: got 'missing.py'; legal is a Python"),
        (LAUNCH, "--norm-scheme preln", "SCRIPT: got none; legal is a Python file."),
    ],
)
def test_a_command_ends_before_megatron_starts(module, line, message, tmp_path):
    """Bad input: one line on stderr, exit code 2, no traceback."""
    done = subprocess.run(
        [sys.executable, "-m", module, *line.split()],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"{module}: error: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("module", [ENTRY, LAUNCH])
def test_help_shows_our_options_without_a_framework(module, capsys):
    """--help ends well at once."""
    main = importlib.import_module(module).main
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert f"-m {module}" in text
    assert all(f"--{name.replace('_', '-')}" in text for name in arguments.NAMES)
