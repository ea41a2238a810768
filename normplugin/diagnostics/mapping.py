"""Where a framework's model keeps what is measured: filled in by the two adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn


class Place(NamedTuple):
    """Whose quantity it is.

    Attributes:
        stack: ``decoder`` or ``encoder``; empty for the whole run.
        layer: 1 to L; 0 in front of the first layer; None outside the layers.
        part: ``stream``, ``attention``, ``ffn``, ``fc2``, a norm site, ...
    """

    stack: str
    layer: int | None
    part: str


def first(value: Any) -> Tensor:
    """Return what a module computes where it returns more beside it."""
    return value[0] if isinstance(value, (tuple, list)) else value


def with_bias(value: Any) -> Tensor:
    """Return output plus bias where the module leaves adding it to its caller (Megatron)."""
    output, bias = value
    return output if bias is None else output + bias


@dataclass(frozen=True)
class Tap:
    """A place where a tensor of a layer can be seen.

    Attributes:
        module: The module it passes.
        event: ``start`` (the stream enters the layer, once more), ``raw`` (a sublayer's output
            before its output norm) or ``end`` (the stream behind a sublayer).
        part: The sublayer.
        side: ``input`` or ``output`` of the module.
        read: Takes the tensor out of what passes there.
    """

    module: nn.Module
    event: str
    part: str
    side: str
    read: Callable[[Any], Tensor] = first


@dataclass(frozen=True)
class Layer:
    """One layer: its input is the stream, its taps are seen in the order of the forward pass.

    ``padding`` returns, from the keyword arguments of the layer's call, a mask of the shape of the
    tokens that is true at padding, or None.
    """

    stack: str
    number: int
    module: nn.Module
    parts: tuple[str, ...]
    taps: tuple[Tap, ...]
    padding: Callable[[dict[str, Any]], Tensor | None] = lambda kwargs: None


@dataclass(frozen=True)
class Group:
    """Parameters whose gradients are reported together."""

    place: Place
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True)
class Gain:
    """The gain of a norm, or a learned scale; ``read`` returns it as it is applied."""

    place: Place
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class ModelMap:
    """All of it. ``roots`` are the stacks: hooks count only inside their forward pass."""

    roots: tuple[nn.Module, ...]
    layers: tuple[Layer, ...]
    groups: tuple[Group, ...]
    gains: tuple[Gain, ...]
