"""Where each site of a scheme lives in a fairseq model, and the check that it is there."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from normplugin.placement import Dims, NormScheme, Site
from normplugin.promises import keep_promises

NORM_MARK = "is_norm_or_scale"  # attribute of parameters that optim.py may spare from decay
Shapes = dict[str, tuple[int, ...]]

_ATTENTION = {"attention": "self_attn", "cross_attention": "encoder_attn"}
_STACK = {"embedding": "layernorm_embedding", "final": "layer_norm"}
# role -> path below the attention module or the layer; "input" and "residual" share a slot.
_IN_ATTENTION = {
    "output": "output_norm",
    "query": "q_proj.output_norm",
    "key": "k_proj.output_norm",
}
_IN_LAYER = {"hidden": "fc2.hidden_norm", "output": "fc2.output_norm", "residual_scale": "w_resid"}


def module_path(site: Site, scheme: NormScheme) -> str:
    """Return the path of a site's module (or scale) below its layer, or below the stack.

    Upstream has one norm slot per sublayer. It is the input norm of a scheme without C and the
    residual norm (C) of a scheme with C, whose input norm then sits in front of the projections.
    """
    if site.sublayer == "stack":
        return _STACK[site.role]
    letters = scheme.ffn if site.sublayer == "ffn" else scheme.attention
    in_slot = site.role == "residual" or (site.role == "input" and "C" not in letters)
    if site.sublayer == "ffn":
        if site.role == "input":
            return "final_layer_norm" if in_slot else "fc1.input_norm"
        return "final_layer_norm" if in_slot else _IN_LAYER[site.role]
    attention = _ATTENTION[site.sublayer]
    if in_slot:
        return f"{attention}_layer_norm"
    if site.role == "head_scale":
        inside = "out_proj." if scheme.head_scale == "before-out-proj" else ""
        return f"{attention}.{inside}head_scale"
    return f"{attention}.{'input_norm' if site.role == 'input' else _IN_ATTENTION[site.role]}"


def parameter_names(site: Site, scheme: NormScheme) -> tuple[str, ...]:
    """Return the names of a site's parameters, below its layer or the stack."""
    path = module_path(site, scheme)
    if not site.is_norm:
        return (path,)
    return tuple(f"{path}.{parameter}" for parameter in scheme.site_parameters(site))


def promised_layer(scheme: NormScheme, dims: Dims, cross_attention: bool = False) -> Shapes:
    """Return name -> shape of every norm and scale parameter of one layer."""
    return {
        name: (dims.width(site.width),)
        for site in scheme.layer_sites(cross_attention)
        for name in parameter_names(site, scheme)
    }


def promised_stack(scheme: NormScheme, dims: Dims) -> Shapes:
    """Return name -> shape of every norm parameter of a stack outside its layers."""
    return {
        name: (dims.width(site.width),)
        for site in scheme.stack_sites()
        for name in parameter_names(site, scheme)
    }


def promised(
    scheme: NormScheme, dims: Dims, prefix: str = "decoder", cross_attention: bool = False
) -> Shapes:
    """Return name -> shape of every norm and scale parameter of the stack called ``prefix``."""
    layer = promised_layer(scheme, dims, cross_attention)
    shapes = {f"{prefix}.{name}": shape for name, shape in promised_stack(scheme, dims).items()}
    for i in range(dims.n_layers):
        shapes |= {f"{prefix}.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def existing(model: nn.Module) -> Shapes:
    """Return name -> shape of every norm and scale that a layer, or a stack, really has."""
    return {name: tuple(parameter.shape) for name, parameter in norm_parameters(model)}


def norm_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the norm gains, norm biases and learned scales of a layer, or of a stack.

    That is every vector that is no bias of a linear, embeddings aside. A stack's layers are left
    out: each is checked when it is built, before a wrapper (checkpointing, sharding) renames or
    flattens its parameters.
    """
    for path, module in model.named_modules():
        if path.startswith(("embed_", "layers.")):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 1 and not (isinstance(module, nn.Linear) and name == "bias"):
                yield f"{path}.{name}" if path else name, parameter


def check_promises(scheme: NormScheme, promise: Shapes, module: nn.Module) -> None:
    """Mark the norms and scales of a freshly built module, after comparing them with the promise.

    Raises:
        SchemeError: See `keep_promises`.
    """
    what = f"the built {type(module).__name__}"
    keep_promises(what, scheme.name, promise, existing(module))
    mark(module)


def mark(module: nn.Module) -> None:
    """Mark the norms and scales of a module for optim.py."""
    for _, parameter in norm_parameters(module):
        setattr(parameter, NORM_MARK, True)


def reference_names(scheme: NormScheme, cross_attention: bool = False) -> dict[str, str]:
    """Return fairseq's name -> the reference's name for every parameter of one layer."""
    names = {}
    for site in scheme.layer_sites(cross_attention):
        for name in parameter_names(site, scheme):
            suffix = f".{name.rpartition('.')[2]}" if site.is_norm else ""
            names[name] = f"{site}{suffix}"
    linears = {"fc1": "ffn.fc1", "fc2": "ffn.fc2"}
    for sublayer in ("attention", "cross_attention")[: 1 + cross_attention]:
        for theirs, ours in {
            "q_proj": "q",
            "k_proj": "k",
            "v_proj": "v",
            "out_proj": "out",
        }.items():
            linears[f"{_ATTENTION[sublayer]}.{theirs}"] = f"{sublayer}.{ours}"
    for theirs, ours in linears.items():
        for parameter in ("weight", "bias"):
            names[f"{theirs}.{parameter}"] = f"{ours}.{parameter}"
    return names
