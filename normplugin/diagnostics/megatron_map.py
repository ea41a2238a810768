"""Where a Megatron model keeps what is measured: our layers and Megatron's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

from normplugin.diagnostics.mapping import Gain, Group, Layer, ModelMap, Place, Tap, with_bias
from normplugin.diagnostics.options import DiagnosticsError
from normplugin.megatron_plugin.sites import layer_sites, parameter_names
from normplugin.placement import NormScheme, Site, resolve_scheme

_FC2 = re.compile(r"linear_fc2\.weight\d*$")  # of a dense FFN, of every expert
_SUBLAYERS = {"self_attention": "attention", "cross_attention": "cross_attention"}


def map_model(chunks: Sequence[nn.Module]) -> ModelMap:
    """Return where this rank's model chunks keep their layers, norms and embeddings.

    Raises:
        DiagnosticsError: If they have no `TransformerBlock`.
    """
    maps = [_map_chunk(chunk) for chunk in chunks]
    roots = tuple(root for found in maps for root in found.roots)
    if not roots:
        raise DiagnosticsError(
            f"--diagnostics-interval: got a {type(chunks[0]).__name__}; it has no "
            "TransformerBlock. Train without it."
        )
    return ModelMap(
        roots,
        tuple(layer for found in maps for layer in found.layers),
        tuple(group for found in maps for group in found.groups),
        tuple(gain for found in maps for gain in found.gains),
    )


def _map_chunk(chunk: nn.Module) -> ModelMap:
    blocks = {
        name.rpartition(".")[2]: module
        for name, module in chunk.named_modules()
        if isinstance(module, TransformerBlock)
    }
    layers: list[Layer] = []
    groups: list[Group] = []
    gains: list[Gain] = []
    for name, block in blocks.items():
        for layer in block.layers:
            end = _end(block, layer)
            layers.append(_layer(name, layer, end))
            groups += _layer_groups(name, layer)
            gains += _layer_gains(name, layer)
        if block.final_layernorm is not None:
            final = block.final_layernorm
            gains.append(_gain(Place(name, None, "stack.final"), final.weight, block.config))
    groups += _other_groups(chunk, blocks, groups)
    return ModelMap(tuple(blocks.values()), tuple(layers), tuple(groups), tuple(gains))


def _end(block, layer) -> nn.Module:
    """Return the module whose output is the stream behind a layer: the last C is the final norm."""
    scheme = getattr(layer, "scheme", None)
    last = layer.layer_number == layer.config.num_layers
    if last and scheme is not None and "C" in scheme.ffn and block.final_layernorm is not None:
        return block.final_layernorm
    return layer


def _layer(stack: str, layer, end: nn.Module) -> Layer:
    taps = tuple(_taps(layer, end))
    parts = tuple(dict.fromkeys(tap.part for tap in taps if tap.part))
    return Layer(stack, layer.layer_number, layer, parts, taps)


def _taps(layer, end: nn.Module) -> Iterator[Tap]:
    """Megatron's forward: a sublayer ends in front of the next norm slot, be it an identity."""
    if getattr(layer, "embedding_norm", None) is not None:
        yield Tap(layer.embedding_norm, "start", "", "output")
    cross = not isinstance(layer.cross_attention, IdentityOp)
    behind = layer.pre_cross_attn_layernorm if cross else layer.pre_mlp_layernorm
    yield Tap(layer.self_attention, "raw", "attention", "output", with_bias)
    yield Tap(behind, "end", "attention", "input")
    if cross:
        yield Tap(layer.cross_attention, "raw", "cross_attention", "output", with_bias)
        yield Tap(layer.pre_mlp_layernorm, "end", "cross_attention", "input")
    yield Tap(layer.mlp, "raw", "ffn", "output", with_bias)
    yield Tap(end, "end", "ffn", "output")


def _layer_groups(stack: str, layer) -> list[Group]:
    parts: dict[str, list[nn.Parameter]] = {}
    for name, parameter in layer.named_parameters():
        part = _SUBLAYERS.get(name.partition(".")[0], "ffn")
        part = "norms" if _is_norm_or_scale(name) else part
        parts.setdefault(part, []).append(parameter)
        if part == "ffn" and _FC2.search(name):
            parts.setdefault("fc2", []).append(parameter)
    number = layer.layer_number
    return [Group(Place(stack, number, part), tuple(found)) for part, found in parts.items()]


def _is_norm_or_scale(name: str) -> bool:
    return "norm" in name or name.endswith("_scale")


def _layer_gains(stack: str, layer) -> Iterator[Gain]:
    scheme, sites = _scheme_and_sites(layer)
    existing = dict(layer.named_parameters())
    for site in sites:
        name = parameter_names(site, scheme, layer)[0]
        if name in existing:  # latent attention has norms of its own
            place = Place(stack, layer.layer_number, str(site))
            yield _gain(place, existing[name], layer.config, site.is_norm)
    if getattr(layer, "embedding_norm", None) is not None:
        weight = layer.embedding_norm.weight
        yield _gain(Place(stack, 0, "stack.embedding"), weight, layer.config)


def _scheme_and_sites(layer) -> tuple[NormScheme, list[Site]]:
    if hasattr(layer, "scheme"):
        return layer.scheme, layer_sites(layer)
    scheme = resolve_scheme("preln", qk_norm="head" if layer.config.qk_layernorm else None)
    cross = not isinstance(layer.cross_attention, IdentityOp)
    return scheme, list(scheme.layer_sites(cross))


def _gain(place: Place, parameter: nn.Parameter, config, is_norm: bool = True) -> Gain:
    """The gain as applied: Megatron's option for zero-centred gains is for all norms."""
    offset = 1.0 if is_norm and config.layernorm_zero_centered_gamma else 0.0
    return Gain(place, lambda: parameter.detach() + offset)


def _other_groups(chunk: nn.Module, blocks: dict, groups: list[Group]) -> list[Group]:
    """Everything outside the layers of this chunk, but for the last stage's copy of embeddings."""
    seen = {id(p) for group in groups for p in group.parameters}
    found: dict[Place, list[nn.Parameter]] = {}
    for name, parameter in chunk.named_parameters():
        if id(parameter) in seen or not param_is_not_shared(parameter):
            continue
        stack = next((s for s in blocks if f".{s}." in f".{name}"), next(iter(blocks), "decoder"))
        if _is_norm_or_scale(name):
            place = Place(stack, None, "norms")
        elif "embedding" in name:
            place = Place(stack, 0, "embeddings")
        else:
            place = Place(stack, None, "output")
        found.setdefault(place, []).append(parameter)
    return [Group(place, tuple(parameters)) for place, parameters in found.items()]
