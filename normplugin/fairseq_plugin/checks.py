"""Mixes that cannot work, refused before any data is loaded.

Every rule here would otherwise drop, misplace or duplicate a norm without a word.
"""

from __future__ import annotations

from fairseq.tasks import TASK_REGISTRY, FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.multilingual_language_modeling import MultilingualLanguageModelingTask

from normplugin.errors import SchemeError
from normplugin.placement import NormScheme

CAUSAL_TASKS: tuple[type[FairseqTask], ...] = (
    LanguageModelingTask,
    MultilingualLanguageModelingTask,
    TASK_REGISTRY["dummy_lm"],
)
# Upstream option -> what to use instead.
_REPLACED = {
    "scale_attn": "It does nothing in fairseq. Take --arch normformer, or a scheme with B.",
    "scale_fc": "It does nothing in fairseq. Take --arch normformer.",
    "scale_heads": "It does nothing in fairseq. Take --head-scale after-out-proj.",
    "scale_resids": "It does nothing in fairseq. Take --residual-scale.",
    "layernorm_embedding": "Take --embedding-norm.",
    "no_decoder_final_norm": "The scheme decides; take one with C (postln), or drop the option.",
    "base_layers": "BASE layers bring a norm placement of their own. Drop the option.",
}


def check_task_name(task: str, arch: str) -> None:
    """Raise `SchemeError` if a causal architecture is asked to train on another kind of task."""
    cls = TASK_REGISTRY.get(task)
    if cls is not None and not issubclass(cls, CAUSAL_TASKS):
        raise SchemeError(
            f"--task: got {task!r} with --arch {arch}, a causal language model; legal is "
            "--task language_modeling. Take that task, or an architecture made for yours."
        )


def check_task(task: FairseqTask) -> None:
    """The same for a task that exists already (hydra, library use)."""
    if not isinstance(task, CAUSAL_TASKS):
        raise SchemeError(
            f"task: got {type(task).__name__} with a causal language model; legal is "
            "language_modeling. Take that task, or an architecture made for yours."
        )


def check_upstream_options(cfg, scheme: NormScheme) -> None:
    """Raise `SchemeError` for an upstream or plugin option that the scheme cannot honour.

    Args:
        cfg: Model config or parsed arguments; options not set count as off.
        scheme: The placement.
    """

    def on(option: str):
        return getattr(cfg, option, None)

    for option, advice in _REPLACED.items():
        if on(option):
            raise SchemeError(
                f"{_flag(option)}: got {on(option)} with scheme {scheme.name!r}. {advice}"
            )
    if cfg.decoder_embed_dim % cfg.decoder_attention_heads:
        raise SchemeError(
            f"--decoder-attention-heads: got {cfg.decoder_attention_heads}; it must divide "
            f"--decoder-embed-dim {cfg.decoder_embed_dim}. Change one of them."
        )
    for option, clash, advice in _clashes(on, scheme):
        raise SchemeError(f"{_flag(option)}: got {on(option)}; {clash}. {advice}")


def _clashes(on, scheme: NormScheme):
    """Yield (option, clash, advice) for every option that clashes with the scheme."""
    if on("quant_noise_pq") and scheme.head_scale == "before-out-proj":
        yield (
            "quant_noise_pq",
            "it overwrites the weight that carries the head scale",
            "Drop it, or take --head-scale none or after-out-proj.",
        )
    if on("quant_noise_scalar") and not _upstream_modules_only(scheme):
        yield (
            "quant_noise_scalar",
            f"it replaces the linears that carry the norms of scheme {scheme.name!r}",
            "Drop it, or take preln.",
        )
    if on("decoder_xformers_att_config") and scheme.qk_norm != "none":
        yield (
            "decoder_xformers_att_config",
            "xFormers attention reads the projections past the QK-norm",
            "Drop it, or take --qk-norm none.",
        )
    if on("recompute_ffn_norm") and not scheme.ffn_hidden:
        yield (
            "recompute_ffn_norm",
            f"scheme {scheme.name!r} has no FFN hidden norm",
            "Drop it, or take normformer.",
        )
    if on("recompute_ffn_norm") and (on("activation_dropout") or on("relu_dropout")):
        yield (
            "recompute_ffn_norm",
            "activation dropout cannot be rebuilt in the backward pass",
            "Drop it, or set --activation-dropout 0.",
        )


def _upstream_modules_only(scheme: NormScheme) -> bool:
    plain = scheme.head_scale == "none" and scheme.qk_norm == "none" and not scheme.ffn_hidden
    return plain and scheme.attention + scheme.ffn in ("AA", "CC")


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
