"""Puts the sites of a scheme into a copy of Megatron's layer submodules (specs are shared)."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from normplugin.errors import SchemeError
from normplugin.megatron_plugin.linears import (
    FullQKNormMixin,
    HeadScaleMixin,
    HiddenNormMixin,
    mixed,
)
from normplugin.megatron_plugin.norms import MegatronNorm
from normplugin.megatron_plugin.residual import BiasDropoutAdd
from normplugin.placement import NormScheme

# Linears that hold the input norm -> the same linear without one, in the same module.
_WITHOUT_NORM = {"TELayerNormColumnParallelLinear": "TEColumnParallelLinear"}
_AFTER_ATTENTION = ("output", "residual")
_AFTER_FFN = ("output", "residual", "residual_scale")


def base_submodules(config: TransformerConfig):
    """Return the submodules of Megatron's own GPT layer for a config, local or TE.

    Raises:
        SchemeError: For a mix of dense and MoE layers, which one layer spec cannot express.
    """
    if config.num_moe_experts and config.moe_layer_freq != 1:
        raise SchemeError(
            f"--moe-layer-freq: got {config.moe_layer_freq}; one layer spec serves all layers. "
            "Use apply_scheme on get_gpt_decoder_block_spec, or --moe-layer-freq 1."
        )
    local = getattr(config, "transformer_impl", "local") == "local"
    build = (
        functools.partial(
            gpt_layer_specs.get_gpt_layer_local_spec, normalization=config.normalization
        )
        if local
        else gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
    )
    spec = build(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    return spec.submodules


def place(submodules, scheme: NormScheme, config: TransformerConfig):
    """Return a copy of layer submodules with the sites of a scheme."""
    attention = _place_attention(submodules.self_attention, scheme, self_attention=True)
    after = functools.partial(_bias_dropout_add, scheme, config)
    changed = {
        "self_attention": attention,
        "input_layernorm": _input_norm(scheme.attention, attention, "linear_qkv"),
        "self_attn_bda": after("attention", submodules.self_attn_bda),
        "mlp_bda": after("ffn", submodules.mlp_bda),
        "mlp": _place_mlp(submodules.mlp, scheme),
    }
    changed["pre_mlp_layernorm"] = _input_norm(scheme.ffn, changed["mlp"], "linear_fc1")
    if submodules.cross_attention is not IdentityOp:
        cross = _place_attention(submodules.cross_attention, scheme, self_attention=False)
        changed["cross_attention"] = cross
        changed["pre_cross_attn_layernorm"] = _input_norm(scheme.attention, cross, "linear_q")
        changed["cross_attn_bda"] = after("cross_attention", submodules.cross_attn_bda)
    return dataclasses.replace(submodules, **changed)


def _place_attention(spec: ModuleSpec, scheme: NormScheme, self_attention: bool) -> ModuleSpec:
    parts: dict[str, Any] = {}
    old = spec.submodules
    if scheme.head_scale == "before-out-proj":
        parts["linear_proj"] = mixed(HeadScaleMixin, old.linear_proj)
    if self_attention and hasattr(old, "linear_qkv"):
        linear = old.linear_qkv if "A" in scheme.attention else _without_norm(old.linear_qkv)
        full = scheme.qk_norm == "full"
        parts["linear_qkv"] = mixed(FullQKNormMixin, linear) if full else linear
    elif scheme.qk_norm != "none":
        raise SchemeError(
            f"--qk-norm: got {scheme.qk_norm!r} for {spec.module.__name__}; only Megatron's "
            "SelfAttention has it. Take --qk-norm none."
        )
    if scheme.qk_norm == "head":
        parts["q_layernorm"] = parts["k_layernorm"] = MegatronNorm
    return dataclasses.replace(spec, submodules=dataclasses.replace(old, **parts))


def _place_mlp(spec, scheme: NormScheme):
    """The FFN: a ModuleSpec up to megatron-core 0.17, a partial from 0.18 on."""
    old = _submodules(spec)
    if not hasattr(old, "linear_fc1"):
        return spec  # a MoE layer: nothing of ours is inside
    parts = {}
    if "A" not in scheme.ffn:
        parts["linear_fc1"] = _without_norm(old.linear_fc1)
    if scheme.ffn_hidden:
        parts["linear_fc2"] = mixed(HiddenNormMixin, old.linear_fc2)
    new = dataclasses.replace(old, **parts)
    if isinstance(spec, functools.partial):
        return functools.partial(spec.func, *spec.args, **{**spec.keywords, "submodules": new})
    return dataclasses.replace(spec, submodules=new)


def _input_norm(letters: str, spec, linear: str):
    """A: in the slot, or in the linear that brings its own; without A nothing."""
    fused = getattr(getattr(_submodules(spec), linear, None), "__name__", "") in _WITHOUT_NORM
    return MegatronNorm if "A" in letters and not fused else IdentityOp


def _submodules(spec) -> Any:
    if isinstance(spec, functools.partial):
        return spec.keywords.get("submodules")
    return spec.submodules


def _without_norm(linear: type) -> type:
    name = _WITHOUT_NORM.get(linear.__name__)
    return getattr(sys.modules[linear.__module__], name) if name else linear


def _bias_dropout_add(scheme: NormScheme, config: TransformerConfig, sublayer: str, slot):
    """Ours where the scheme has a site around the residual add, else what the spec has."""
    roles = _AFTER_FFN if sublayer == "ffn" else _AFTER_ATTENTION
    if scheme.head_scale == "after-out-proj" and sublayer != "ffn":
        roles = (*roles, "head_scale")
    sites = tuple(
        site
        for site in scheme.layer_sites(cross_attention=True)
        if site.sublayer == sublayer and site.role in roles
    )
    if not sites:
        return slot
    params = {"sites": sites, "scheme": scheme, "layer_config": config}
    return ModuleSpec(module=BiasDropoutAdd, params=params)
