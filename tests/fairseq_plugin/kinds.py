"""Batches, losses and reference models for whole models of every kind."""

from __future__ import annotations

import re

import torch

from normplugin.fairseq_plugin import sites
from normplugin.placement import LETTERS, NAMED_SCHEMES

SOURCE = torch.tensor([[5, 10, 11, 12, 13, 9, 2], [1, 1, 20, 21, 22, 23, 2]])  # left-padded
TARGET = torch.tensor([[2, 30, 31, 32, 33, 34], [2, 40, 41, 42, 1, 1]])  # right-padded

# 0.12.2's own encoder layer has copies of its linears that nothing trains.
PACKED = re.compile(r"layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)$")


def every(suffix: str) -> list[list[str]]:
    """The command lines of all schemes, at the smallest size of a kind."""
    named = [["--arch", f"{scheme}{suffix}_tiny"] for scheme in NAMED_SCHEMES]
    return named + [["--arch", f"preln{suffix}_tiny", "--norm-scheme", x] for x in LETTERS]


def logits(model) -> torch.Tensor:
    """The logits of one batch."""
    if hasattr(model, "decoder"):
        return model(SOURCE, None, TARGET)[0]
    return model(SOURCE)[0]


def loss_and_gradients(model, train: bool):
    """The loss of one batch and its gradients, with dropout if ``train``."""
    model.train(train)
    model.zero_grad()
    torch.manual_seed(1)
    scores = logits(model)
    goal = torch.randint(4, 60, scores.shape[:2])
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), goal.flatten())
    loss.backward()
    used = {n: p.grad for n, p in model.named_parameters() if not PACKED.search(n)}
    return loss.detach(), used


def assert_bit_identical(mine, upstream) -> None:
    """Names, initial values, losses (dropout off and on) and gradients are equal, bit for bit."""
    ours = [name for name in mine.state_dict() if not name.endswith("norm_card")]
    assert ours == [name for name in upstream.state_dict() if not PACKED.search(name)]
    theirs = dict(upstream.named_parameters())
    for name, parameter in mine.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
    for train in (False, True):
        loss, grads = loss_and_gradients(mine, train)
        their_loss, their_grads = loss_and_gradients(upstream, train)
        assert torch.equal(loss, their_loss)
        for name, gradient in their_grads.items():
            assert torch.equal(grads[name], gradient), name


def reference_state(stack, cross_attention: bool = False) -> dict[str, torch.Tensor]:
    """The parameters of an encoder or decoder under the reference's names."""
    names = sites.reference_names(stack.scheme, cross_attention)
    state = {"token_embedding.weight": stack.embed_tokens.weight}
    for i, layer in enumerate(stack.layers):
        state |= {f"layers.{i}.{names[n]}": p for n, p in layer.named_parameters()}
    for site in stack.scheme.stack_sites():
        for name in sites.parameter_names(site, stack.scheme):
            state[f"{site}.{name.rpartition('.')[2]}"] = stack.get_parameter(name)
    return state
