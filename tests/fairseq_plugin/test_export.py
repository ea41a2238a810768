"""A trace of every model computes what the model computes, from a file and for other inputs.

``torch.jit.trace`` is what upstream's models of all kinds support; ``torch.jit.script`` stops at
the keyword arguments of its language models and ``torch.export`` at its padding checks.
"""

from __future__ import annotations

import io

import pytest
import torch
from fairseq_builders import build_model
from kinds import SOURCE, TARGET

from normplugin.placement import NAMED_SCHEMES
from normplugin.testing import randomize_

OPTIONS = ["--norm-type", "rmsnorm", "--qk-norm", "head", "--residual-scale", "--embedding-norm"]
TASKS = {"": "language_modeling", "_mlm": "masked_lm", "_mt": "translation"}


class Logits(torch.nn.Module):
    """fairseq's models return dictionaries, which a trace cannot."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        """The logits."""
        return self.model(*inputs)[0]


@pytest.mark.parametrize("scheme", NAMED_SCHEMES)
@pytest.mark.parametrize("suffix", TASKS)
@pytest.mark.parametrize("options", [[], OPTIONS], ids=["", "options"])
def test_trace(scheme, suffix, options):
    """Saved and loaded, the trace equals the model on a batch it has not seen."""
    argv = ["--task", TASKS[suffix], "--arch", f"{scheme}{suffix}_tiny", *options]
    recompute = ["--recompute-ffn-norm"] * (scheme == "normformer" and bool(options))
    model = build_model(*argv, *recompute).eval().requires_grad_(False)
    randomize_(model)
    seen = (SOURCE, SOURCE.ne(1).sum(1), TARGET) if suffix == "_mt" else (SOURCE,)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(Logits(model), seen, check_trace=False), file)
    file.seek(0)
    other = tuple(batch.flip(0) for batch in seen)
    torch.testing.assert_close(torch.jit.load(file)(*other), model(*other)[0])
