"""Tools for proving a layer right: used by this package's tests and benchmarks, open to yours."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


def saved_bytes(function: Callable[[], Tensor]) -> int:
    """Return the bytes that outlive ``function`` for its backward pass, its output left out.

    Counted is what exists afterwards and did not before: neither parameters nor inputs. The
    function runs twice: what its first call caches is not for the backward pass.
    """
    function()
    with _Allocations() as allocations:
        output = function()
    gc.collect()
    if torch.distributed.is_initialized():
        time.sleep(0.05)  # a group's threads let go of their tensors a moment after a collective
    own = StorageWeakRef(output.untyped_storage())
    return sum(
        size
        for storage, size in allocations.sizes.items()
        if storage != own and not storage.expired()
    )


class _Allocations(TorchDispatchMode):
    """The sizes of the storages that torch's operators make; 0 for those that they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._meet((args, kwargs), made=False)
        out = func(*args, **(kwargs or {}))
        self._meet(out, made=True)
        return out

    def _meet(self, tree, made: bool) -> None:
        for tensor in tree_leaves(tree):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.sizes.setdefault(StorageWeakRef(storage), storage.nbytes() if made else 0)
