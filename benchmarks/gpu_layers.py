"""The contests of the GPU check: norms alone, fairseq's layers, Megatron's layers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.layer_runs import Forward, forward_backward
from benchmarks.report import Place
from benchmarks.timing import Runner
from normplugin.norms import Norm, activation_norm
from normplugin.placement import Dims, NormSpec
from normplugin.testing import saved_bytes

KINDS = ("layernorm", "rmsnorm")


@dataclass
class Contest:
    """Variants beside one that is stock; ``saved``: per token, unit: the input's width."""

    place: Place
    stock: str
    runners: dict[str, Runner] = field(default_factory=dict)
    saved: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, module: nn.Module, forward: Forward, x: Tensor, wait) -> None:
        """Count what one forward keeps, and make its runner."""
        kept = saved_bytes(lambda: forward(x))
        self.saved[name] = kept / x.element_size() / x.numel()
        self.runners[name] = forward_backward(module, forward, x, wait)


Start = Callable[[], contextlib.AbstractContextManager[Contest]]


def contests(device: str, sizes) -> Mapping[str, Start]:
    """Name -> context that builds it; fairseq and megatron need their framework."""
    built = {"norms": _norms, "fairseq": _fairseq, "megatron": _megatron}
    return {name: functools.partial(build, device, sizes) for name, build in built.items()}


def _place(case: str, framework: str, device: str, sizes) -> tuple[Place, torch.dtype, Callable]:
    """The columns of a case, its dtype, and what waits for the device."""
    dtype = torch.bfloat16
    shape = f"d{sizes.d_model} ffn{4 * sizes.d_model} h{sizes.n_heads} {sizes.batch}x{sizes.length}"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    return Place(case, framework, shape, str(dtype)[6:]), dtype, wait


def _dims(sizes) -> Dims:
    return Dims(2, sizes.d_model, 4 * sizes.d_model, sizes.n_heads)


@contextlib.contextmanager
def _norms(device: str, sizes) -> Iterator[Contest]:
    """Norms over d_ffn: torch's LayerNorm, ours, and both after GELU."""
    place, dtype, wait = _place("norms over d_ffn", "torch", device, sizes)
    contest, width = Contest(place, "F.layer_norm"), 4 * sizes.d_model
    make: dict[str, Any] = {"dtype": dtype, "device": device}
    stock = nn.LayerNorm(width, **make)
    ours = {kind: Norm(width, NormSpec(kind, 1e-5, False)).to(**make) for kind in KINDS}
    x = torch.randn(sizes.length, sizes.batch, width, **make, requires_grad=True)
    contest.add("F.layer_norm", stock, stock, x, wait)
    contest.add("gelu, F.layer_norm", stock, lambda x: stock(F.gelu(x)), x, wait)
    for kind, norm in ours.items():
        contest.add(kind, norm, norm, x, wait)
        fused = functools.partial(activation_norm, activation=F.gelu, norm=norm)
        contest.add(f"gelu, {kind} fused", norm, fused, x, wait)
    yield contest


@contextlib.contextmanager
def _fairseq(device: str, sizes) -> Iterator[Contest]:
    """Every variant of the fairseq suite."""
    from benchmarks.fairseq_builders import STOCK, VARIANTS, build_layer
    from benchmarks.fairseq_cases import layer_input

    place, dtype, wait = _place("fairseq layer", "fairseq", device, sizes)
    contest = Contest(place, STOCK)
    for variant in VARIANTS:
        layer = build_layer(variant, _dims(sizes)).to(device, dtype)
        x, mask = (t.detach().to(device, dtype) for t in _sized(layer_input, sizes))
        forward = functools.partial(_fairseq_forward, layer, mask)
        contest.add(variant.name, layer, forward, x.requires_grad_(), wait)
    yield contest


def _fairseq_forward(layer: nn.Module, mask: Tensor, x: Tensor) -> Tensor:
    return layer(x, self_attn_mask=mask)[0]


@contextlib.contextmanager
def _megatron(device: str, sizes) -> Iterator[Contest]:
    """Every variant of the Megatron suite on one rank."""
    from benchmarks.megatron_builders import (
        STOCK,
        VARIANTS,
        build_layer,
        forward_of,
        layer_input,
        process_groups,
    )

    place, dtype, wait = _place("Megatron layer", "megatron", device, sizes)
    contest = Contest(place, STOCK)
    with process_groups(device=device):
        for name in VARIANTS:
            layer = build_layer(name, _dims(sizes), dtype=dtype)
            layer.to(device, dtype)  # as Megatron's Float16Module: torch's norms are born fp32
            x, hidden = (t.detach().to(device) for t in _sized(layer_input, sizes))
            x = x.to(dtype).requires_grad_()
            contest.add(name, layer, forward_of(layer, hidden), x, wait)
        yield contest


def _sized(layer_input: Callable, sizes) -> tuple[Tensor, Tensor]:
    return layer_input(_dims(sizes), sizes.length, sizes.batch)
