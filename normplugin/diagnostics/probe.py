"""Hooks on a model for one update. Between updates there are none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normplugin.diagnostics import quantities
from normplugin.diagnostics.mapping import Layer, ModelMap, Place, Tap
from normplugin.diagnostics.tally import Key, Tally, shared_keys

Gradient = Callable[[nn.Parameter], "Tensor | None"]


class Probe:
    """Measures one update at a time: `attach`, forward and backward passes, `detach`, `read`.

    Hooks look and never touch: outputs, gradients and the random state stay bit for bit the same.
    They count only inside the forward pass of a stack, so activations that are computed again in
    the backward pass are not counted again.

    Args:
        model_map: What is measured, on this rank.

    Attributes:
        paused: True while what passes is not to be counted (a dummy batch).
    """

    def __init__(self, model_map: ModelMap):
        self.map = model_map
        self.paused = False
        self._handles: list[Any] = []
        self._inside = 0
        self._keys: list[Key] | None = None
        self.tally = Tally(self._device())

    def attach(self) -> None:
        """Begin a new measurement."""
        self.detach()
        self.tally = Tally(self._device())
        self.paused, self._inside = False, 0
        for root in self.map.roots:
            self._handles.append(root.register_forward_pre_hook(self._enter))
            self._handles.append(root.register_forward_hook(self._leave))
        for layer in self.map.layers:
            watch = _Watch(layer, self)
            hook = layer.module.register_forward_pre_hook(watch.begin, with_kwargs=True)
            self._handles.append(hook)
            self._handles += [watch.hook(tap) for tap in layer.taps]

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def attached(self) -> bool:
        """True between `attach` and `detach`."""
        return bool(self._handles)

    @property
    def counting(self) -> bool:
        """True where a hook is to count."""
        return self._inside > 0 and not self.paused

    @torch.no_grad()
    def add_gradients(self, gradient: Gradient, factor: Tensor | float = 1.0) -> None:
        """Measure gradients.

        Args:
            gradient: Returns the gradient of a parameter, or what of it this rank must add; None
                where there is none.
            factor: What the gradients must be multiplied with.
        """
        for group in self.map.groups:
            for parameter in group.parameters:
                found = gradient(parameter)
                if found is not None and found.numel():
                    norm, mean = _keys(group.place, quantities.GRADIENT)
                    n = found.numel()
                    self.tally.add(norm, quantities.square_sum(found) * factor**2, n)
                    self.tally.add(mean, quantities.abs_sum(found) * factor, n)

    @torch.no_grad()
    def add_gains(self) -> None:
        """Measure the gains of norms and the learned scales, as they are now."""
        for gain in self.map.gains:
            mean, low, high = _keys(gain.place, quantities.GAIN)
            value = gain.read().double()
            self.tally.add(mean, value.sum(), value.numel())
            self.tally.extend(low, value.min())
            self.tally.extend(high, value.max())

    def read(self) -> dict[Key, float | None]:
        """Return all numbers; called on all ranks together."""
        if self._keys is None:
            self._keys = shared_keys(list(self._expected()))
        return self.tally.read(self._keys)

    def _expected(self) -> Iterator[Key]:
        for layer in self.map.layers:
            for number in (0, 1) if layer.number == 1 else (layer.number,):
                names = {k: v for k, v in quantities.STREAM.items() if number or k in _AT_ENTRY}
                yield from _keys(Place(layer.stack, number, "stream"), names)
            for part in layer.parts:
                yield from _keys(Place(layer.stack, layer.number, part), quantities.SUBLAYER)
        for group in self.map.groups:
            yield from _keys(group.place, quantities.GRADIENT)
        for gain in self.map.gains:
            yield from _keys(gain.place, quantities.GAIN)

    def _device(self) -> torch.device:
        places = (group.parameters[0].device for group in self.map.groups if group.parameters)
        return next(places, torch.device("cpu"))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside -= 1


_AT_ENTRY = ("variance", "max_abs")


def _keys(place: Place, names: dict[str, str]) -> list[Key]:
    return [Key(place, name, kind) for name, kind in names.items()]


class _Watch:
    """Follows the stream through one layer."""

    def __init__(self, layer: Layer, probe: Probe):
        self.layer, self.probe = layer, probe
        self.keep: Tensor | None = None
        self.entry = self.stream = torch.empty(0)

    def hook(self, tap: Tap):
        """Register the hook of a tap."""
        if tap.side == "input":
            return tap.module.register_forward_pre_hook(functools.partial(self._before, tap))
        return tap.module.register_forward_hook(functools.partial(self._after, tap))

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """The layer is called."""
        if self.probe.counting:
            padding = self.layer.padding(kwargs)
            self.keep = None if padding is None else ~padding.bool()
            self._start(args[0] if args else next(iter(kwargs.values())))

    def _before(self, tap: Tap, module: nn.Module, args: tuple) -> None:
        self._see(tap, args)

    def _after(self, tap: Tap, module: nn.Module, args: tuple, output: Any) -> None:
        self._see(tap, output)

    @torch.no_grad()
    def _see(self, tap: Tap, value: Any) -> None:
        if not self.probe.counting:
            return
        x = tap.read(value).detach()
        if tap.event == "start":
            self._start(x)
        elif tap.event == "raw":
            self._sublayer(tap.part, "raw", x)
        else:
            self._sublayer(tap.part, "contribution", quantities.contribution(self.stream, x))
            self.stream = x
            if tap.part == self.layer.parts[-1]:
                self._finish()

    def _start(self, x: Tensor) -> None:
        self.entry = self.stream = x.detach()

    def _sublayer(self, part: str, what: str, x: Tensor) -> None:
        place = Place(self.layer.stack, self.layer.number, part)
        self._mean(Key(place, f"{what}_variance", "mean"), quantities.variance(x))
        self._max(Key(place, f"{what}_max_abs", "max"), quantities.max_abs(x))

    def _finish(self) -> None:
        """The stream leaves the layer."""
        place = Place(self.layer.stack, self.layer.number, "stream")
        angle = quantities.angular_distance(self.entry, self.stream)
        self._stream(place, self.stream)
        self._mean(Key(place, "angular_distance", "mean"), angle)
        if self.layer.number == 1:
            self._stream(place._replace(layer=0), self.entry)
        self.entry = self.stream = torch.empty(0)

    def _stream(self, place: Place, x: Tensor) -> None:
        self._mean(Key(place, "variance", "mean"), quantities.variance(x))
        self._max(Key(place, "max_abs", "max"), quantities.max_abs(x))

    def _mean(self, key: Key, values: Tensor) -> None:
        if self.keep is None:
            self.probe.tally.add(key, values.double().sum(), values.numel())
        else:
            kept = torch.where(self.keep, values, values.new_zeros(()))
            self.probe.tally.add(key, kept.double().sum(), self.keep.sum())

    def _max(self, key: Key, values: Tensor) -> None:
        if self.keep is not None:
            values = torch.where(self.keep, values, values.new_zeros(()))
        self.probe.tally.extend(key, values.max())
