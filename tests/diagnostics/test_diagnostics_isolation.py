"""The two frameworks stay apart, and what needs none loads none."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "fairseq", "megatron"}


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("options", set()),
        ("records", set()),
        ("table", set()),
        ("command", set()),
        ("quantities", {"torch"}),
        ("probe", {"torch"}),
        ("session", {"torch"}),
        ("fairseq_train", {"torch", "fairseq"}),
        ("megatron_train", {"torch", "megatron"}),
    ],
)
def test_a_module_imports_no_more_than_it_needs(module, allowed):
    """In a fresh process."""
    script = (
        f"import sys, normplugin.diagnostics.{module}\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if "No module named 'megatron.training'" in done.stderr:
        pytest.skip("megatron-core before 0.17 has no trainer")
    assert done.returncode == 0, done.stderr
    assert HEAVY & set(done.stdout.split()) == allowed
