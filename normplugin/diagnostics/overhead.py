"""What measuring costs: a training step of a fairseq model, measured and plain, interleaved.

    python -m normplugin.diagnostics.overhead --arch normformer --layers 4 --pairs 10

Prints the medians and the share of time that measuring every 10th update adds. Needs fairseq.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks import TASK_REGISTRY
from torch import nn

import normplugin.fairseq_plugin  # noqa: F401 -- registers
from normplugin.diagnostics import records
from normplugin.diagnostics.fairseq_map import map_model
from normplugin.diagnostics.probe import Probe
from normplugin.diagnostics.session import summarize


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="normformer")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="window; 4 windows are one batch")
    parser.add_argument("--pairs", type=int, default=10, help="of one plain and one measured step")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(args.arch, args.layers, args.tokens).to(device).train()
    step = Step(model, torch.randint(4, 8000, (4, args.tokens), device=device))
    times: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(-2, args.pairs):
        for measured in (False, True):
            seconds = step.timed(measured)
            if pair >= 0:
                times[measured].append(seconds)
    plain, watched = (statistics.median(times[key]) for key in (False, True))
    print(f"{args.arch}, {args.layers} layers, 4 x {args.tokens} tokens, {device}")
    print(f"plain {plain * 1e3:.1f} ms, measured {watched * 1e3:.1f} ms, medians of {args.pairs}")
    print(f"every 10th update measured: +{(watched / plain - 1) * 10:.2f} % of the time")


class Step:
    """One update of Adam with clipping, measured or not."""

    def __init__(self, model: nn.Module, tokens: torch.Tensor):
        self.model, self.tokens = model, tokens
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        self.probe = Probe(map_model(model))
        self.path = Path(tempfile.mkdtemp()) / "diagnostics.jsonl"

    def timed(self, measured: bool) -> float:
        """Seconds of one update."""
        _synchronize()
        start = time.perf_counter()
        if measured:
            self.probe.attach()
        logits = self.model(self.tokens)[0].float()
        nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens.flatten()).backward()
        self.probe.detach()
        if measured:
            self.probe.add_gradients(lambda parameter: parameter.grad)
            self.probe.add_gains()
            records.append(self.path, summarize(self.probe.read(), 1))
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        _synchronize()
        return time.perf_counter() - start


def build(arch: str, layers: int, window: int) -> nn.Module:
    """The language model of an architecture, with 8000 symbols."""
    argv = ["data", "--task", "language_modeling", "--arch", arch, "--decoder-layers", str(layers)]
    argv += ["--tokens-per-sample", str(window), "--share-decoder-input-output-embed"]
    parser = options.get_training_parser()
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, argv))
    dictionary = Dictionary()
    for i in range(8000):
        dictionary.add_symbol(str(i))
    task = TASK_REGISTRY["language_modeling"](cfg.task, dictionary, dictionary)
    return task.build_model(cfg.model)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
