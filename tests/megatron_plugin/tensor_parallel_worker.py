"""One rank of the tensor-parallel test; arguments: RANK WORLD STORE EXPECTED."""

from __future__ import annotations

import sys

import torch
from megatron_builders import build_layer, config, on_cpu, start

from normplugin.megatron_plugin.sites import is_sharded, layer_sites, parameter_names

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def local(full: torch.Tensor, parameter: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """This rank's slice of a full parameter or gradient, by Megatron's own attributes."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    return full.chunk(world, parameter.partition_dim)[rank]


def summed_over_tp(name: str, parameter: torch.Tensor, cfg) -> bool:
    """Megatron's rule for gradients that each rank holds a part of (finalize_model_grads)."""
    flagged = cfg.sequence_parallel and getattr(parameter, "sequence_parallel", False)
    by_name = cfg.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
    return flagged or by_name


def check(case: dict, rank: int, world: int) -> None:
    cfg = config(
        tensor_model_parallel_size=world, sequence_parallel=case["sequence_parallel"],
        **case["changes"],
    )  # fmt: skip
    layer = build_layer(case["scheme"], cfg)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(local(case["parameters"][name], parameter, rank, world))
    split = (lambda t: t.chunk(world)[rank]) if cfg.sequence_parallel else (lambda t: t)
    x = split(case["x"]).clone().requires_grad_()
    length = case["x"].size(0)
    hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    out, _ = layer(x, attention_mask=hidden)
    torch.testing.assert_close(out, split(case["out"]), **TOLERANCE)
    (out * split(case["weights"])).sum().backward()
    torch.testing.assert_close(x.grad, split(case["gradients"]["x"]), **TOLERANCE)
    for name, parameter in layer.named_parameters():
        gradient = parameter.grad
        if summed_over_tp(name, parameter, cfg):
            torch.distributed.all_reduce(gradient)
        expected = local(case["gradients"][name], parameter, rank, world)
        torch.testing.assert_close(
            gradient, expected, **TOLERANCE, msg=lambda m, n=name: f"{case['id']} {n}: {m}"
        )
        assert parameter.dim() == 1 or name.endswith(".weight")
    for site in layer_sites(layer):
        for name in parameter_names(site, layer.scheme, layer):
            sharded = getattr(layer.get_parameter(name), "tensor_model_parallel", False)
            assert sharded == is_sharded(site, layer.scheme), name


def main() -> None:
    rank, world, store, expected = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.cuda.current_device = on_cpu
    start(rank, world, store, tensor_model_parallel_size=world)
    for case in torch.load(expected, weights_only=False):
        check(case, rank, world)
    print("EQUAL")


if __name__ == "__main__":
    main()
