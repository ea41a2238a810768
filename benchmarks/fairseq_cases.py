"""What is run and counted for fairseq: a decoder layer, and a whole training step."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.fairseq_builders import Shape, Variant, build_layer, build_training
from benchmarks.layer_runs import forward_backward, per_token
from benchmarks.timing import Laps, Runner, Watch
from normplugin.placement import Dims
from normplugin.testing import saved_bytes

ITEMSIZE = 4  # fp32


def layer_runner(variant: Variant, shape: Shape) -> Runner:
    """Forward and backward of one layer; the gradients of input and parameters are taken."""
    layer = build_layer(variant, shape.dims)
    x, mask = layer_input(shape.dims, shape.length, shape.batch)
    return forward_backward(layer, lambda x: layer(x, self_attn_mask=mask)[0], x)


def step_runner(variant: Variant, shape: Shape) -> Runner:
    """A training step in the order of fairseq's trainer, without logging."""
    training = build_training(variant, shape)
    optimizer, sample = training.optimizer, _sample(shape)

    def run() -> Laps:
        watch = Watch()
        optimizer.zero_grad()
        loss, tokens, _ = training.criterion(training.model, sample)
        watch.lap("forward")
        optimizer.backward(loss)
        watch.lap("backward")
        optimizer.multiply_grads(1.0 / tokens)
        optimizer.clip_grad_norm(0.0)
        optimizer.step()
        watch.lap("optimizer")
        return watch.laps

    return run


def layer_input(dims: Dims, length: int, batch: int) -> tuple[Tensor, Tensor]:
    """A residual stream (T, B, D) that wants a gradient, and the causal mask (T, T)."""
    torch.manual_seed(1)
    x = torch.randn(length, batch, dims.d_model, requires_grad=True)
    return x, torch.full((length, length), float("-inf")).triu(1)


def saved_per_token(variant: Variant, dims: Dims) -> tuple[float, float]:
    """What autograd keeps of one layer: (per token, whatever the tokens), in units of d_model.

    The head scale's effective weight (d x d) is of the second kind.
    """
    layer, length = build_layer(variant, dims), 16

    def kept(batch: int) -> float:
        x, mask = layer_input(dims, length, batch)
        size = saved_bytes(lambda: layer(x, self_attn_mask=mask)[0])
        return size / ITEMSIZE / dims.d_model

    return per_token(kept, length)


def parameters(variant: Variant, dims: Dims) -> int:
    """Parameters of one layer."""
    return sum(p.numel() for p in build_layer(variant, dims).parameters())


def _sample(shape: Shape) -> dict:
    """A batch as fairseq's language modelling task collates it."""
    torch.manual_seed(2)
    tokens = torch.randint(4, shape.vocabulary, (shape.batch, shape.length + 1))
    lengths = torch.full((shape.batch,), shape.length)
    return {
        "net_input": {"src_tokens": tokens[:, :-1].contiguous(), "src_lengths": lengths},
        "target": tokens[:, 1:].contiguous(),
        "ntokens": shape.tokens,
        "nsentences": shape.batch,
    }
