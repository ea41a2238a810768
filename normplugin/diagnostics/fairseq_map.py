"""Where a fairseq model keeps what is measured: our models and upstream's own."""

from __future__ import annotations

from collections.abc import Iterator

from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import nn

from normplugin.diagnostics.mapping import Gain, Group, Layer, ModelMap, Place, Tap
from normplugin.diagnostics.options import DiagnosticsError
from normplugin.fairseq_plugin.sites import norm_parameters, parameter_names
from normplugin.norms import Norm
from normplugin.placement import NormScheme, resolve_scheme

_LAYERS = (TransformerEncoderLayerBase, TransformerDecoderLayerBase)
# Upstream's own additions, which only its decoder layer has.
_UPSTREAM = {
    "attention.output": "attn_ln.weight",
    "attention.head_scale": "c_attn",
    "ffn.hidden": "ffn_layernorm.weight",
    "ffn.residual_scale": "w_resid",
}
_SUBLAYERS = {"self_attn": "attention", "encoder_attn": "cross_attention"}


def map_model(model: nn.Module) -> ModelMap:
    """Return where a model keeps its layers, norms and embeddings.

    Raises:
        DiagnosticsError: If it has no stack of fairseq's transformer layers.
    """
    stacks = dict(_stacks(model))
    if not stacks:
        raise DiagnosticsError(
            f"--diagnostics-interval: got a {type(model).__name__}; it has no decoder.layers or "
            "encoder.layers of fairseq's transformer layers. Train without it."
        )
    layers: list[Layer] = []
    groups: list[Group] = []
    gains: list[Gain] = []
    for name, (_, stack) in stacks.items():
        for number, layer in enumerate(_layers(stack), 1):
            layers.append(_layer(name, number, layer))
            groups += _layer_groups(name, number, layer)
            gains += _layer_gains(name, number, layer, _scheme(stack, layer))
        gains += _stack_gains(name, stack)
    groups += _other_groups(model, stacks, groups)
    roots = tuple(stack for _, stack in stacks.values())
    return ModelMap(roots, tuple(layers), tuple(groups), tuple(gains))


def _stacks(model: nn.Module) -> Iterator[tuple[str, tuple[str, nn.Module]]]:
    """Yield name, path and module of every stack; a second one of a kind is named by its path."""
    seen = set()
    for path, module in model.named_modules():
        layers = _layers(module)
        if layers and all(isinstance(layer, _LAYERS) for layer in layers):
            name = "decoder" if isinstance(layers[0], TransformerDecoderLayerBase) else "encoder"
            name = path if name in seen else name
            seen.add(name)
            yield name, (path, module)


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of a stack. LayerDrop's list draws random numbers when iterated over."""
    found = getattr(module, "layers", None)
    return list(found.children()) if isinstance(found, nn.ModuleList) else []


def _scheme(stack: nn.Module, layer) -> NormScheme:
    scheme = getattr(stack, "scheme", None)
    return scheme or resolve_scheme("preln" if layer.normalize_before else "postln")


def _layer(stack: str, number: int, layer) -> Layer:
    taps = tuple(_taps(layer))
    parts = tuple(dict.fromkeys(tap.part for tap in taps))
    decoder = isinstance(layer, TransformerDecoderLayerBase)
    mask = "self_attn_padding_mask" if decoder else "encoder_padding_mask"

    def padding(kwargs):
        found = kwargs.get(mask)
        return None if found is None else found.t()  # (B, T) beside x (T, B, D)

    return Layer(stack, number, layer, parts, taps, padding)


def _taps(layer) -> Iterator[Tap]:
    """Upstream's forward: every sublayer ends in front of the next norm slot, or behind its own."""
    sublayers = [("attention", layer.self_attn, layer.self_attn_layer_norm)]
    if getattr(layer, "encoder_attn", None) is not None:
        sublayers.append(("cross_attention", layer.encoder_attn, layer.encoder_attn_layer_norm))
    sublayers.append(("ffn", layer.fc2, layer.final_layer_norm))
    slots = [slot for _, _, slot in sublayers[1:]]
    for i, (part, module, slot) in enumerate(sublayers):
        norm = getattr(module, "output_norm", None)
        if part == "attention" and norm is None:
            norm = getattr(layer, "attn_ln", None)
        if norm is None:
            yield Tap(module, "raw", part, "output")
        else:
            yield Tap(norm, "raw", part, "input")
        if part == "ffn":
            yield Tap(layer, "end", part, "output")
        elif layer.normalize_before:
            yield Tap(slots[i], "end", part, "input")
        else:
            yield Tap(slot, "end", part, "output")


def _layer_groups(stack: str, number: int, layer: nn.Module) -> list[Group]:
    norms = {name for name, _ in norm_parameters(layer)}
    parts: dict[str, list[nn.Parameter]] = {}
    for name, parameter in layer.named_parameters():
        part = "norms" if name in norms else _SUBLAYERS.get(name.partition(".")[0], "ffn")
        parts.setdefault(part, []).append(parameter)
        if name == "fc2.weight":
            parts["fc2"] = [parameter]
    return [Group(Place(stack, number, part), tuple(found)) for part, found in parts.items()]


def _layer_gains(stack: str, number: int, layer: nn.Module, scheme: NormScheme) -> list[Gain]:
    cross = getattr(layer, "encoder_attn", None) is not None
    names = {str(s): parameter_names(s, scheme)[0] for s in scheme.layer_sites(cross)}
    if not hasattr(layer, "scheme"):
        existing = dict(layer.named_parameters())
        names |= {part: name for part, name in _UPSTREAM.items() if name in existing}
    return [
        _gain(Place(stack, number, part), layer.get_submodule(path), leaf)
        for part, (path, _, leaf) in ((p, n.rpartition(".")) for p, n in names.items())
    ]


def _stack_gains(name: str, stack: nn.Module) -> Iterator[Gain]:
    for part, layer, slot in (
        ("stack.embedding", 0, "layernorm_embedding"),
        ("stack.final", None, "layer_norm"),
    ):
        module = getattr(stack, slot, None)
        if getattr(module, "weight", None) is not None:
            yield _gain(Place(name, layer, part), module, "weight")


def _gain(place: Place, module, leaf: str) -> Gain:
    name = "gain" if isinstance(module, Norm) and leaf == "weight" else leaf
    return Gain(place, lambda: getattr(module, name))


def _other_groups(model: nn.Module, stacks, groups: list[Group]) -> list[Group]:
    """Everything outside the layers, each tensor once however many modules share it."""
    seen = {id(p) for group in groups for p in group.parameters}
    norms = {id(p) for _, stack in stacks.values() for _, p in norm_parameters(stack)}
    owners = {path.partition(".")[0]: name for name, (path, _) in stacks.items()}
    found: dict[Place, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in seen:
            continue
        stack = owners.get(name.partition(".")[0], next(iter(stacks)))
        if id(parameter) in norms:
            place = Place(stack, None, "norms")
        elif "embed" in name:
            place = Place(stack, 0, "embeddings")
        else:
            place = Place(stack, None, "output")
        found.setdefault(place, []).append(parameter)
    return [Group(place, tuple(parameters)) for place, parameters in found.items()]
