"""Where each site of a scheme lives in a Megatron layer, and the check that it is there."""

from __future__ import annotations

from torch import nn

from normplugin.placement import NormScheme, Site
from normplugin.promises import keep_promises

_ATTENTION = {"attention": "self_attention", "cross_attention": "cross_attention"}
_AFTER = {"attention": "self_attn_bda", "cross_attention": "cross_attn_bda", "ffn": "mlp_bda"}
_INPUT = {
    "attention": ("input_layernorm", "self_attention.linear_qkv"),
    "cross_attention": ("pre_cross_attn_layernorm", "cross_attention.linear_q"),
    "ffn": ("pre_mlp_layernorm", "mlp.linear_fc1"),
}
_INSIDE = {"output": "output_norm", "residual": "residual_norm"}


def module_path(site: Site, scheme: NormScheme) -> str:
    """Return the path of a site's module or scale below its layer."""
    if site.role == "input":
        return _INPUT[site.sublayer][0]
    if site.role in ("query", "key"):
        if scheme.qk_norm == "head":
            return f"self_attention.{site.role[0]}_layernorm"
        return f"self_attention.linear_qkv.{site.role}_norm"
    if site.role == "head_scale" and scheme.head_scale == "before-out-proj":
        return f"{_ATTENTION[site.sublayer]}.linear_proj.head_scale"
    if site.role == "hidden":
        return "mlp.linear_fc2.hidden_norm"
    return f"{_AFTER[site.sublayer]}.{_INSIDE.get(site.role, site.role)}"


def is_sharded(site: Site, scheme: NormScheme) -> bool:
    """True where every TP rank holds a slice of the parameters."""
    if site.role == "head_scale":
        return scheme.head_scale == "before-out-proj"
    return site.role == "hidden" or (site.role in ("query", "key") and scheme.qk_norm == "full")


def parameter_names(site: Site, scheme: NormScheme, layer: nn.Module) -> tuple[str, ...]:
    """Return the names of a site's parameters below its layer.

    An input norm may be part of the linear behind it (Transformer Engine).
    """
    path = module_path(site, scheme)
    if not site.is_norm:
        return (path,)
    if site.role == "input":
        fused = _INPUT[site.sublayer][1]
        if hasattr(_find(layer, fused), "layer_norm_weight"):
            return tuple(f"{fused}.layer_norm_{name}" for name in scheme.site_parameters(site))
    return tuple(f"{path}.{name}" for name in scheme.site_parameters(site))


def layer_sites(layer) -> list[Site]:
    """Return the sites of a built layer; a last layer leaves its C to the stack's final norm."""
    cross = any(name.startswith("cross_attention.") for name, _ in layer.named_parameters())
    sites = list(layer.scheme.layer_sites(cross))
    if layer.layer_number == layer.config.num_layers:
        sites = [s for s in sites if (s.sublayer, s.role) != ("ffn", "residual")]
    return sites


def added_names(layer) -> list[str]:
    """Return the names below a layer of the parameters that its scheme adds to Pre-LN."""
    return [
        name
        for site in layer_sites(layer)
        if site.role != "input"
        for name in parameter_names(site, layer.scheme, layer)
    ]


def check_promises(layer) -> None:
    """Compare what the layer's scheme promises on this rank with what exists.

    Raises:
        SchemeError: See `keep_promises`.
    """
    scheme, config = layer.scheme, layer.config
    promise = {
        name: _size(site, config) // (layer.tp_group.size() if is_sharded(site, scheme) else 1)
        for site in layer_sites(layer)
        for name in parameter_names(site, scheme, layer)
    }
    found = {
        name: parameter.numel()
        for name, parameter in layer.named_parameters()
        if _is_norm_or_scale(name) and not name.startswith("embedding_norm")
    }
    keep_promises(f"layer {layer.layer_number}", scheme.name, promise, found)


def _is_norm_or_scale(name: str) -> bool:
    """Megatron's own latent norms of MLA aside, these names tell norms and scales apart."""
    latent = "self_attention.kv_layernorm" in name or "_up_proj.layer_norm" in name
    return not latent and ("norm" in name or name.endswith("_scale"))


def _size(site: Site, config) -> int:
    head_dim = config.kv_channels
    groups = config.num_query_groups if site.role == "key" else config.num_attention_heads
    sizes = {
        "d_model": config.hidden_size,
        "d_ffn": config.ffn_hidden_size,
        "n_heads": config.num_attention_heads,
        "head_dim": head_dim,
    }
    full = site.role in ("query", "key") and site.width == "d_model"
    return groups * head_dim if full else sizes[site.width]


def _find(layer: nn.Module, path: str):
    """Return the submodule at a dotted path, or None."""
    module: nn.Module | None = layer
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
