"""Tools for proving a layer right: used by this package's tests and benchmarks, open to yours."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


def randomize_(module: nn.Module, seed: int = 0) -> None:
    """Give every gain, bias and scale a random value; a gain of 1 or a bias of 0 hides mistakes.

    Matrices are drawn as well, so that the result depends on the seed and the shapes only.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(module.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.ndim > 1:
            value = noise / parameter.shape[-1] ** 0.5
        elif name.endswith("bias"):
            value = 0.5 * noise
        else:
            value = 1.0 + 0.3 * noise
        with torch.no_grad():
            parameter.copy_(value)


def gradients(
    output: Tensor, inputs: Mapping[str, Tensor], module: nn.Module, seed: int = 1
) -> dict[str, Tensor]:
    """Return the gradient of a random projection of ``output`` by every input and parameter."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    sources = {**inputs, **dict(module.named_parameters())}
    found = torch.autograd.grad((output * weights).sum(), list(sources.values()))
    return dict(zip(sources, found, strict=True))


def saved_bytes(function: Callable[[], Tensor], module: nn.Module) -> int:
    """Return the bytes autograd keeps for the backward of ``function``, parameters left out.

    Storages are counted once however often they are saved.
    """
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept alive: no address reuse
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(size for size, _ in kept.values())
