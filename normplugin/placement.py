"""Where norms and learned scales sit: the one vocabulary of this package.

A block with residual stream x and sublayers F in {attention, FFN} is described by three letters
per sublayer (Kim et al. 2025, arXiv:2502.02732) and a few further sites:

    A   input norm      F(N(x))
    B   output norm     x + dropout(N(F(.) + bias))
    C   residual norm   N(x + F(.))

Nothing else in the package defines a placement. Both adapters and the reference read a
`NormScheme`; each `Site` of a scheme is one norm or one learned scale with its formula and width.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from normplugin.errors import SchemeError, unknown_value

NORM_TYPES = ("layernorm", "rmsnorm")
HEAD_SCALES = ("none", "before-out-proj", "after-out-proj")
QK_NORMS = ("none", "head", "full")
LETTERS = ("A", "B", "C", "A+B", "A+C", "B+C", "A+B+C")
KINDS = ("causal_lm", "masked_lm", "encoder_decoder")


@dataclass(frozen=True)
class NormSpec:
    """Which norm is computed at every norm site of a scheme.

    Attributes:
        type: ``layernorm`` or ``rmsnorm``.
        eps: Added to the variance (LayerNorm) or mean square (RMSNorm).
        zero_centered: The stored gain is w and the gain applied is 1 + w.
    """

    type: str
    eps: float
    zero_centered: bool


@dataclass(frozen=True)
class Dims:
    """Sizes of one model: layers, residual stream, FFN hidden width, query heads."""

    n_layers: int
    d_model: int
    d_ffn: int
    n_heads: int

    @property
    def head_dim(self) -> int:
        """Width of one head, d_model / n_heads."""
        return self.d_model // self.n_heads

    def width(self, name: str) -> int:
        """Return the size called ``d_model``, ``d_ffn``, ``n_heads`` or ``head_dim``."""
        return int(getattr(self, name))


@dataclass(frozen=True)
class Site:
    """One norm or one learned scale.

    Attributes:
        sublayer: ``attention``, ``cross_attention``, ``ffn`` or ``stack``.
        role: ``input``, ``output``, ``residual``, ``hidden``, ``query``, ``key``, ``embedding``,
            ``final`` (norms); ``head_scale``, ``residual_scale`` (scales).
        width: Name of the size its parameters have, see `Dims.width`.
        formula: The line of the block it stands in.
    """

    sublayer: str
    role: str
    width: str
    formula: str

    @property
    def is_norm(self) -> bool:
        """True for a norm, False for a learned scale."""
        return not self.role.endswith("_scale")

    def __str__(self) -> str:
        return f"{self.sublayer}.{self.role}"


@dataclass(frozen=True)
class NormScheme:
    """The whole placement of one model. Built by `resolve_scheme`, which checks the mix.

    Attributes:
        name: What the user typed (``normformer``, ``A+C``).
        attention: Letters of the attention sublayers, a subset of ``ABC``.
        ffn: Letters of the FFN sublayer.
        ffn_hidden: Norm over d_ffn between the activation and the second linear.
        head_scale: One of `HEAD_SCALES`.
        residual_scale: Learned vector on the FFN's skip path.
        qk_norm: One of `QK_NORMS`.
        embedding_norm: Norm on the embeddings.
        final_norm: Norm on the residual stream after the last layer.
        output_norm_init: Value at which the gains of B start.
        norm: What every norm site computes.
    """

    name: str
    attention: str
    ffn: str
    ffn_hidden: bool
    head_scale: str
    residual_scale: bool
    qk_norm: str
    embedding_norm: bool
    final_norm: bool
    output_norm_init: float
    norm: NormSpec

    def layer_sites(self, cross_attention: bool = False) -> Iterator[Site]:
        """Yield the sites of one layer, in the order of the forward pass."""
        yield from self._attention_sites("attention")
        if cross_attention:
            yield from self._attention_sites("cross_attention")
        hidden = Site("ffn", "hidden", "d_ffn", "W_2 N(act(W_1 x + b_1)) + b_2")
        skip = Site("ffn", "residual_scale", "d_model", "lambda * x + F(x)")
        yield from self._sublayer_sites(
            "ffn", self.ffn, [hidden] * self.ffn_hidden, [skip] * self.residual_scale
        )

    def stack_sites(self) -> Iterator[Site]:
        """Yield the sites outside the layers."""
        if self.embedding_norm:
            yield Site("stack", "embedding", "d_model", "x_0 = N(E)")
        if self.final_norm:
            yield Site("stack", "final", "d_model", "y = N(x_L)")

    def site_parameters(self, site: Site) -> tuple[str, ...]:
        """Names of the parameters of a site: weight and bias of a norm, or the scale itself."""
        if not site.is_norm:
            return (site.role,)
        return ("weight", "bias") if self.norm.type == "layernorm" else ("weight",)

    def count(self, site: Site, dims: Dims) -> int:
        """Number of parameters of one site."""
        return len(self.site_parameters(site)) * dims.width(site.width)

    def identity(self) -> dict[str, object]:
        """All that decides the function computed: neither the name nor where gains start."""
        fields = dataclasses.asdict(self)
        del fields["name"], fields["output_norm_init"]
        return fields

    def _attention_sites(self, sublayer: str) -> Iterator[Site]:
        inner = []
        if self.qk_norm != "none":
            width = "head_dim" if self.qk_norm == "head" else "d_model"
            inner += [
                Site(sublayer, role, width, f"{role[0]} = N({role[0]})")
                for role in ("query", "key")
            ]
        if self.head_scale == "before-out-proj":
            inner.append(Site(sublayer, "head_scale", "n_heads", "concat(g_i * head_i) W_O"))
        elif self.head_scale == "after-out-proj":
            inner.append(Site(sublayer, "head_scale", "n_heads", "g_i * (concat(head) W_O + b)_i"))
        yield from self._sublayer_sites(sublayer, self.attention, inner, [])

    @staticmethod
    def _sublayer_sites(
        sublayer: str, letters: str, inner: list[Site], skip: list[Site]
    ) -> Iterator[Site]:
        f = "FFN" if sublayer == "ffn" else "Attn"
        if "A" in letters:
            yield Site(sublayer, "input", "d_model", f"{f}(N(x))")
        yield from inner
        if "B" in letters:
            yield Site(sublayer, "output", "d_model", f"x + N({f}(.))")
        yield from skip
        if "C" in letters:
            yield Site(sublayer, "residual", "d_model", f"N(x + {f}(.))")


@dataclass(frozen=True)
class _Preset:
    attention: str
    ffn: str
    ffn_hidden: bool = False
    head_scale: str = "none"
    qk_norm: str = "none"


_PRESETS: Mapping[str, _Preset] = {
    "preln": _Preset("A", "A"),
    "postln": _Preset("C", "C"),
    "periln": _Preset("AB", "AB"),
    "normformer": _Preset("AB", "A", ffn_hidden=True, head_scale="before-out-proj"),
    "outputln": _Preset("B", "B", qk_norm="full"),
    **{letters: _Preset(letters.replace("+", ""), letters.replace("+", "")) for letters in LETTERS},
}
SCHEMES = tuple(_PRESETS)
NAMED_SCHEMES = tuple(name for name in SCHEMES if name not in LETTERS)


def resolve_scheme(
    name: str,
    *,
    norm_type: str | None = None,
    norm_eps: float | None = None,
    norm_zero_centered: bool = False,
    head_scale: str | None = None,
    residual_scale: bool = False,
    qk_norm: str | None = None,
    embedding_norm: bool = False,
    output_norm_init: float | None = None,
) -> NormScheme:
    """Return the placement called ``name`` with the user's options on top.

    Args:
        name: One of `SCHEMES`; letters may come in any order and case (``b+a``).
        norm_type: One of `NORM_TYPES`; default ``layernorm``.
        norm_eps: Default 1e-5.
        norm_zero_centered: Store gains as offsets from 1.
        head_scale: One of `HEAD_SCALES`; default: the scheme's.
        residual_scale: Learn a vector on the FFN's skip path.
        qk_norm: One of `QK_NORMS`; default: the scheme's.
        embedding_norm: Norm on the embeddings.
        output_norm_init: Starting gain of the output norms (B); default 1.

    Raises:
        SchemeError: Unknown name or value, or an option that would have no effect.
    """
    key = canonical_name(name)
    preset = _PRESETS[key]
    norm_kind = _choice("--norm-type", norm_type, "layernorm", NORM_TYPES)
    eps = _number("--norm-eps", norm_eps, 1e-5)
    if not 0.0 < eps < 1.0:
        raise SchemeError(f"--norm-eps: got {norm_eps}; legal is 0 < eps < 1. Try 1e-5.")
    output_init = _number("--output-norm-init", output_norm_init, 1.0)
    letters = preset.attention + preset.ffn
    if output_norm_init is not None and "B" not in letters:
        raise SchemeError(
            f"--output-norm-init: got {output_norm_init}; scheme {key!r} has no output norm (B). "
            "Drop it, or take periln, normformer, outputln or letters with B."
        )
    return NormScheme(
        name=key,
        attention=preset.attention,
        ffn=preset.ffn,
        ffn_hidden=preset.ffn_hidden,
        head_scale=_choice("--head-scale", head_scale, preset.head_scale, HEAD_SCALES),
        residual_scale=bool(residual_scale),
        qk_norm=_choice("--qk-norm", qk_norm, preset.qk_norm, QK_NORMS),
        embedding_norm=bool(embedding_norm),
        final_norm="C" not in preset.ffn,
        output_norm_init=output_init,
        norm=NormSpec(norm_kind, eps, bool(norm_zero_centered)),
    )


def canonical_name(name: str) -> str:
    """Return the spelling of `SCHEMES` for what a user typed, or raise `SchemeError`."""
    lowered = name.lower().replace(" ", "")
    if lowered in NAMED_SCHEMES:
        return lowered
    letters = "+".join(sorted(lowered.upper().split("+")))
    if letters in LETTERS:
        return letters
    raise SchemeError(unknown_value("--norm-scheme", name, SCHEMES))


def _choice(option: str, value: str | None, default: str, values: tuple[str, ...]) -> str:
    if value is None:
        return default
    if value not in values:
        raise SchemeError(unknown_value(option, value, values))
    return value


def _number(option: str, value: float | None, default: float) -> float:
    try:
        number = default if value is None else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise SchemeError(f"{option}: got {value!r}; legal are finite numbers. Try {default}.")
    return number


def architecture_hash(scheme: NormScheme, dims: Dims, kind: str) -> str:
    """Return 16 hex digits that are equal exactly for equal architectures.

    Covers the placement, the norm, the sizes and the model kind; not the vocabulary, the
    activation, the dropouts or the name the user typed: ``A+B`` and ``periln`` share a hash.
    """
    if kind not in KINDS:
        raise SchemeError(unknown_value("model kind", kind, KINDS))
    card = {"scheme": scheme.identity(), "dims": dataclasses.asdict(dims), "kind": kind}
    return hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()[:16]
