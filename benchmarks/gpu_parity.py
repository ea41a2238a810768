"""Parity of the norms with the reference on a device: outputs and all gradients, per dtype."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normplugin.norms import Norm, activation_norm, activation_norm_linear
from normplugin.placement import NormSpec
from normplugin.reference import ReferenceNorm, gelu
from normplugin.testing import randomize_

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Our error may be this multiple of that of the plain formula in the same dtype: other kernels sum
# in another order and round the activation elsewhere. One unit in the last place of the largest
# exact value is allowed in any case: where the formula happens to be exact, a multiple is nothing.
FACTOR = 4.0
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Parity:
    """One comparison: the worst of output and gradients, as a share of what is allowed."""

    operation: str
    spec: str
    dtype: str
    width: int
    worst: str
    share: float

    @property
    def ok(self) -> bool:
        """Also False for a share that is no number."""
        return self.share <= 1.0


def check_all(device: str, rows: int, widths: tuple[int, ...]) -> Iterator[Parity]:
    """Yield every operation in every dtype, type of norm and width, gains of the same dtype or not.

    Args:
        device: Where ours and the formula run.
        rows: Tokens.
        widths: Of the norms.
    """
    specs = [NormSpec(t, 1e-5, z) for t in ("layernorm", "rmsnorm") for z in (False, True)]
    for dtype, spec, width in itertools.product(DTYPES, specs, widths):
        for kept in dict.fromkeys((dtype, torch.float32)):
            for name in OPERATIONS:
                yield _check(name, spec, width, rows, dtype, kept, device)


def _check(name, spec: NormSpec, width: int, rows: int, dtype, kept, device: str) -> Parity:
    ours, formula = OPERATIONS[name]
    norm, linear, x, dy = _inputs(name, spec, width, rows, dtype, kept, device)
    plain = ReferenceNorm(width, spec).to(device, kept)
    plain.load_state_dict(norm.state_dict())
    exact_norm = ReferenceNorm(width, spec).to(device, torch.float64)
    exact_norm.load_state_dict(norm.state_dict())
    exact_linear = nn.Linear(width, width // 4, device=device, dtype=torch.float64)
    exact_linear.load_state_dict(linear.state_dict())
    exact = _results(formula, x.double(), dy.double(), exact_norm, exact_linear)
    mine = _results(ours, x, dy, norm, linear)
    theirs = _results(formula, x, dy, plain, linear)
    shares = {key: _share(mine[key], theirs[key], exact[key]) for key in exact}
    worst = max(shares, key=lambda key: (shares[key] != shares[key], shares[key]))
    kind = spec.type + (" zero-centred" if spec.zero_centered else "")
    types = str(dtype)[6:] + ("" if kept == dtype else ", fp32 gains")
    return Parity(name, kind, types, width, worst, shares[worst])


def _inputs(name, spec: NormSpec, width: int, rows: int, dtype, kept, device: str):
    """Drawn on the CPU, so that every device gets the same; a linear for the operation with one."""
    generator = torch.Generator().manual_seed(width)
    norm, linear = Norm(width, spec), nn.Linear(width, width // 4)
    randomize_(norm, 1)
    randomize_(linear, 2)
    out = width // 4 if name == "activation_norm_linear" else width
    x = torch.randn(rows, width, generator=generator) + 0.5
    dy = torch.randn(rows, out, generator=generator)
    norm, linear = norm.to(device, kept), linear.to(device, dtype)
    return norm, linear, x.to(device, dtype), dy.to(device, dtype)


def _results(function: Callable, x: Tensor, dy: Tensor, norm, linear) -> Tensors:
    """The output, and the gradients of x and of every parameter that takes part."""
    x = x.detach().requires_grad_()
    y = function(x, norm, linear)
    named = {"dx": x, **dict(norm.named_parameters())}
    if y.size(-1) != x.size(-1):
        named |= {f"linear {name}": p for name, p in linear.named_parameters()}
    found = torch.autograd.grad(y, list(named.values()), dy)
    return {"y": y.detach(), **dict(zip(named, found, strict=True))}


def _share(mine: Tensor, theirs: Tensor, exact: Tensor) -> float:
    """Our largest error over what is allowed; nan where ours is not finite or of another dtype."""
    if mine.dtype != theirs.dtype:
        return float("nan")
    scale = exact.abs().max().item()
    unit = torch.finfo(mine.dtype).eps * scale
    error, formula = ((t.double() - exact).abs().max().item() for t in (mine, theirs))
    return error / (FACTOR * formula + unit)


def _linear(y: Tensor, linear: nn.Linear) -> Tensor:
    return nn.functional.linear(y, linear.weight, linear.bias)


# name -> (ours, the formula), each a function of (x, norm, linear)
OPERATIONS: dict[str, tuple[Callable, Callable]] = {
    "Norm": (lambda x, norm, _: norm(x), lambda x, norm, _: norm(x)),
    "activation_norm": (
        lambda x, norm, _: activation_norm(x, nn.functional.gelu, norm),
        lambda x, norm, _: norm(gelu(x)),
    ),
    "activation_norm_linear": (
        lambda x, norm, linear: activation_norm_linear(x, nn.functional.gelu, norm, linear),
        lambda x, norm, linear: _linear(norm(gelu(x)), linear),
    ),
}
