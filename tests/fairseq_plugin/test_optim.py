"""Adam with norms and scales spared from weight decay."""

from __future__ import annotations

import pytest
import torch
from fairseq import optim
from fairseq_builders import build_model, parse

from normplugin.errors import SchemeError
from normplugin.fairseq_plugin.sites import promised

ARGV = ["--arch", "normformer_tiny", "--residual-scale"]


def optimizer(model, *options: str):
    cfg = parse(
        "--task", "language_modeling", *ARGV, "--optimizer", "adam_decay_exempt",
        "--weight-decay", "0.1", "--lr", "0.5", *options,
    )  # fmt: skip
    return optim.build_optimizer(cfg.optimizer, list(model.parameters()))


def step_without_gradient(model, opt) -> set[str]:
    """Names of the parameters that one step with zero gradients changes."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def norms_and_scales(model) -> set[str]:
    return set(promised(model.decoder.scheme, model.decoder.card.dims))


def nonzero(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.any()}


@pytest.mark.parametrize("exempt", ["norms", "vectors"])
def test_spared_parameters_do_not_decay(exempt):
    """With zero gradients a step changes exactly the parameters that are not exempt."""
    model = build_model(*ARGV)
    for p in model.parameters():
        torch.nn.init.normal_(p)
    spared = norms_and_scales(model)
    if exempt == "vectors":
        spared = {name for name, p in model.named_parameters() if p.ndim <= 1}
    opt = optimizer(model, "--no-decay", exempt)
    assert step_without_gradient(model, opt) == nonzero(model) - spared
    assert "decoder.layers.0.self_attn.out_proj.head_scale" in spared


def test_plain_adam_decays_everything():
    """fairseq's own Adam decays gains and scales too: the reason for this optimizer."""
    model = build_model(*ARGV)
    cfg = parse(
        "--task", "language_modeling", *ARGV, "--optimizer", "adam", "--weight-decay", "0.1",
        "--lr", "0.5",
    )  # fmt: skip
    opt = optim.build_optimizer(cfg.optimizer, list(model.parameters()))
    assert norms_and_scales(model) & nonzero(model) <= step_without_gradient(model, opt)


def test_resuming_keeps_them_spared():
    """fairseq writes the configured decay over every group when it resumes; not over this one."""
    model = build_model(*ARGV)
    opt = optimizer(model)
    step_without_gradient(model, opt)
    fresh = optimizer(model)
    fresh.load_state_dict(opt.state_dict(), optimizer_overrides=fresh.optimizer_config)
    assert [g["weight_decay"] for g in fresh.param_groups] == [0.1, 0.0]
    assert not norms_and_scales(model) & step_without_gradient(model, fresh)


def test_flattened_parameters_are_refused():
    """--fp16 flattens all parameters into one tensor: nothing could be spared."""
    cfg = parse(
        "--task", "language_modeling", *ARGV, "--optimizer", "adam_decay_exempt", "--lr", "0.5"
    )
    flat = torch.nn.Parameter(torch.zeros(10))
    with pytest.raises(SchemeError, match="Add --memory-efficient-fp16"):
        optim.build_optimizer(cfg.optimizer, [flat])
