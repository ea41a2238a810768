"""Megatron configs that would drop or misplace a norm, refused when the layer is built."""

from __future__ import annotations

import dataclasses

from megatron.core.transformer.transformer_config import TransformerConfig

from normplugin.errors import SchemeError
from normplugin.megatron_plugin.norms import norm_spec
from normplugin.placement import NormScheme


def complete_scheme(scheme: NormScheme, config: TransformerConfig) -> NormScheme:
    """Return the scheme with what Megatron's own options say: the norm, and QK-norm per head.

    ``--qk-layernorm`` is Megatron's QK-norm per head; a scheme with it needs the option on, because
    Megatron sums the gains' gradients over TP by that option and their names.

    Raises:
        SchemeError: If ``--qk-layernorm`` contradicts the scheme.
    """
    scheme = dataclasses.replace(scheme, norm=norm_spec(config))
    if config.multi_latent_attention:
        return scheme  # its q_layernorm and kv_layernorm belong to the latent projections
    if config.qk_layernorm and scheme.qk_norm == "full":
        raise SchemeError(
            f"--qk-layernorm: got it with scheme {scheme.name!r}, whose QK-norm spans the full "
            "width. Drop it, or take --qk-norm head."
        )
    if config.qk_layernorm:
        return dataclasses.replace(scheme, qk_norm="head")
    if scheme.qk_norm == "head":
        config.qk_layernorm = True
    return scheme


def check_config(config: TransformerConfig, scheme: NormScheme) -> None:
    """Raise `SchemeError` for the first option that the scheme cannot be combined with."""
    for option, clash, advice in _clashes(config, scheme):
        raise SchemeError(f"{option}: got it with scheme {scheme.name!r}; {clash}. {advice}")


def _clashes(config: TransformerConfig, scheme: NormScheme):
    """Yield (option, clash, advice) of every clash; a plain Pre-LN has none."""
    if scheme.attention + scheme.ffn == "AA" and not (
        scheme.ffn_hidden or scheme.residual_scale or scheme.embedding_norm
    ):
        if scheme.head_scale == "none" and scheme.qk_norm != "full":
            return

    def on(*names: str) -> bool:
        return any(getattr(config, name, None) for name in names)

    drop = "Drop the option, or take preln."
    if on("use_te_op_fuser", "use_transformer_engine_op_fuser", "use_grouped_gemm_for_dense_mlp"):
        yield "--use-transformer-engine-op-fuser", "the fused FFN reads the weights only", drop
    if on("inference_fuse_tp_communication"):
        yield "--inference-fuse-tp-communication", "it skips the bias-dropout-add", drop
    if getattr(config, "transformer_impl", "") == "inference_optimized":
        yield "--transformer-impl inference_optimized", "it bypasses the norms", drop
    if getattr(config, "cuda_graph_impl", "none") == "transformer_engine":
        yield "--cuda-graph-impl transformer_engine", "it leaves out the added parameters", drop
    if on("mtp_num_layers"):
        yield "--mtp-num-layers", "Megatron builds those layers without the scheme", drop
    if on("num_moe_experts") and scheme.ffn_hidden:
        yield (
            "--num-experts",
            "the router probability enters before the second linear and a norm there cancels it",
            "Take a scheme without the FFN hidden norm (periln).",
        )
    if scheme.qk_norm != "none" and config.multi_latent_attention:
        yield "--multi-latent-attention", "its queries and keys are latent", "Take --qk-norm none."
    if scheme.qk_norm == "full":
        yield from _full_qk_clashes(config)
    if config.num_attention_heads % config.tensor_model_parallel_size:
        yield (
            "--tensor-model-parallel-size",
            f"it does not divide {config.num_attention_heads} heads",
            "Change one of them.",
        )


def _full_qk_clashes(config: TransformerConfig):
    if getattr(config, "attention_output_gate", False):
        yield "--attention-output-gate", "the gate lies among the queries", "Take --qk-norm head."
    groups = config.num_query_groups or config.num_attention_heads
    if groups % config.tensor_model_parallel_size:
        yield (
            "--num-query-groups",
            f"{config.tensor_model_parallel_size} TP ranks do not divide {groups} groups",
            "Take --qk-norm head.",
        )
