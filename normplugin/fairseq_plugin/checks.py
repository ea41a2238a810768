"""Mixes that cannot work, refused before any data is loaded.

Every rule here would otherwise drop, misplace or duplicate a norm without a word.
"""

from __future__ import annotations

from fairseq.tasks import TASK_REGISTRY

from normplugin.errors import SchemeError
from normplugin.placement import NormScheme
from normplugin.presets import Architecture, sibling

# Model kind -> fairseq's tasks for it, the one to recommend first.
TASKS = {
    "causal_lm": ("language_modeling", "multilingual_language_modeling", "dummy_lm"),
    "masked_lm": (
        *("masked_lm", "multilingual_masked_lm", "dummy_masked_lm"),
        *("sentence_prediction", "sentence_ranking"),
    ),
    "encoder_decoder": (
        *("translation", "translation_multi_simple_epoch", "denoising", "dummy_mt"),
    ),
}
_KINDS = {
    "causal_lm": ("a causal language model", "without _mlm or _mt"),
    "masked_lm": ("a masked language model", "ending in _mlm"),
    "encoder_decoder": ("an encoder-decoder", "ending in _mt"),
}
# Upstream option -> what to use instead.
_REPLACED = {
    "scale_attn": "It does nothing in fairseq. Take --arch normformer, or a scheme with B.",
    "scale_fc": "It does nothing in fairseq. Take --arch normformer.",
    "scale_heads": "It does nothing in fairseq. Take --head-scale after-out-proj.",
    "scale_resids": "It does nothing in fairseq. Take --residual-scale.",
    "layernorm_embedding": "Take --embedding-norm.",
    "no_decoder_final_norm": "The scheme decides; take one with C (postln), or drop the option.",
    "cross_self_attention": "It merges two sublayers of the scheme. Drop it.",
    "no_cross_attention": "It removes a sublayer of the scheme. Drop it.",
    "base_layers": "BASE layers bring a norm placement of their own. Drop the option.",
}


def check_task(task: type, kind: str, arch: Architecture | None = None) -> None:
    """Raise `SchemeError` if a model of this kind is asked to train on another kind's task.

    Tasks from outside fairseq pass, unless they extend another kind's.
    """
    home = next((k for k in TASKS if issubclass(task, _classes(k))), None)
    if home == kind or (home is None and not task.__module__.startswith("fairseq.")):
        return
    name = next((n for n, cls in TASK_REGISTRY.items() if cls is task), task.__name__)
    other = f", or an --arch {_KINDS[home][1]}" if home else ""
    if home and arch:
        other = f", or --arch {sibling(arch, home).name}"
    raise SchemeError(
        f"--task: got {name!r} with {f'--arch {arch.name}, ' if arch else ''}{_KINDS[kind][0]}; "
        f"legal is --task {TASKS[kind][0]}. Take that task{other}."
    )


def _classes(kind: str) -> tuple[type, ...]:
    return tuple(TASK_REGISTRY[name] for name in TASKS[kind] if name in TASK_REGISTRY)


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
    for side in ("encoder", "decoder"):
        width, heads = on(f"{side}_embed_dim"), on(f"{side}_attention_heads")
        if width and width % heads:
            raise SchemeError(
                f"--{side}-attention-heads: got {heads}; it must divide --{side}-embed-dim "
                f"{width}. Change one of them."
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
    for option in ("encoder_xformers_att_config", "decoder_xformers_att_config"):
        if on(option) and scheme.qk_norm != "none":
            yield (
                option,
                "xFormers attention reads the projections past the QK-norm",
                "Drop it, or take --qk-norm none.",
            )
    for option in ("mha_heads_to_keep", "ffn_blocks_to_remove"):
        if (on(option) or -1) != -1 and not _upstream_modules_only(scheme):
            yield (
                option,
                f"pruning knows no norm or scale that scheme {scheme.name!r} adds",
                "Drop it, or take preln.",
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
