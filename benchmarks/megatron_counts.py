"""What is counted of a Megatron layer in each layout; run as a module, rank 1 of two."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.collectives import CollectiveCounter, Traffic
from benchmarks.layer_runs import per_token
from benchmarks.megatron_builders import (
    VARIANTS,
    build_layer,
    forward_of,
    layer_input,
    process_groups,
)
from normplugin.placement import Dims
from normplugin.testing import saved_bytes

ITEMSIZE = 4  # fp32
LENGTH, BATCH = 16, 2


@dataclass(frozen=True)
class Layout:
    """A way to spread a layer."""

    name: str
    tp: int
    sequence_parallel: bool = False


LAYOUTS = (Layout("TP=1", 1), Layout("TP=2", 2), Layout("TP=2 SP", 2, True))


@dataclass(frozen=True)
class Counts:
    """Of one layer on one rank.

    Args:
        forward: Collectives of the forward pass.
        backward: Of the backward pass; Megatron sums gradients after it, which is not of a layer.
        saved: What autograd keeps per token of the whole sequence, in d_model elements.
        constant: What it keeps whatever the tokens, in d_model elements.
        parameters: Of this rank.
    """

    forward: Traffic
    backward: Traffic
    saved: float
    constant: float
    parameters: int


def count(name: str, dims: Dims, layout: Layout) -> Counts:
    """Count one variant; the process groups of the layout are up."""
    layer = build_layer(name, dims, layout.tp, layout.sequence_parallel)
    share = layout.tp if layout.sequence_parallel else 1

    def kept(batch: int) -> float:
        x, hidden = layer_input(dims, LENGTH, batch)
        x = x.detach()[: LENGTH // share].requires_grad_()
        forward = forward_of(layer, hidden)
        return saved_bytes(lambda: forward(x)) / ITEMSIZE / dims.d_model

    saved, constant = per_token(kept, LENGTH)
    size = sum(p.numel() for p in layer.parameters())
    return Counts(*_traffic(layer, dims, layout, share), saved, constant, size)


def _traffic(layer, dims: Dims, layout: Layout, share: int) -> tuple[Traffic, Traffic]:
    x, hidden = layer_input(dims, LENGTH, BATCH)
    x = x.detach()[: LENGTH // share].requires_grad_()
    with CollectiveCounter(layout.tp) as counter:
        y = forward_of(layer, hidden)(x)
        forward = counter.traffic
        y.backward(torch.ones_like(y))
    return forward, counter.traffic - forward


def count_all(dims: Dims, names=VARIANTS) -> dict[str, dict[str, Counts]]:
    """Counts by layout and variant, of rank 0: this process; a second one is rank 1 over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        other = _start_rank_1(folder, dims, names)
        try:
            with process_groups():  # while the other imports Megatron
                found = _count_layouts(dims, names, 1)
            with _words_of(other, folder), process_groups(0, 2, _store(folder)):
                found |= _count_layouts(dims, names, 2)
            other.communicate(timeout=60)
        finally:
            other.kill()
    return found


def _count_layouts(dims: Dims, names, tp: int) -> dict[str, dict[str, Counts]]:
    return {
        layout.name: {name: count(name, dims, layout) for name in names}
        for layout in LAYOUTS
        if layout.tp == tp
    }


def _start_rank_1(folder: str, dims: Dims, names) -> subprocess.Popen:
    task = json.dumps({"dims": dataclasses.asdict(dims), "names": list(names)})
    command = [sys.executable, "-m", "benchmarks.megatron_counts", folder, task]
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    with open(os.path.join(folder, "errors.txt"), "w", encoding="utf-8") as errors:
        return subprocess.Popen(command, cwd=root, env=environment, stderr=errors)


@contextlib.contextmanager
def _words_of(other: subprocess.Popen, folder: str):
    """Where this rank fails for want of the other, say what the other said."""
    try:
        yield
    except RuntimeError as error:
        if other.poll():
            words = Path(folder, "errors.txt").read_text(encoding="utf-8")
            raise RuntimeError(f"rank 1 failed:\n{words[-3000:]}") from error
        raise


def _store(folder: str) -> str:
    return os.path.join(folder, "store")


def _rank_1(folder: str, task: str) -> None:
    torch.set_num_threads(1)
    given = json.loads(task)
    with process_groups(1, 2, _store(folder)):
        _count_layouts(Dims(**given["dims"]), given["names"], 2)


if __name__ == "__main__":
    _rank_1(*sys.argv[1:])
