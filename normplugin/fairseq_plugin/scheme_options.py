"""The options of a scheme, shared by the configs of all model kinds."""

# No postponed annotations: fairseq reads the types of dataclass fields.
# ruff: noqa: UP045  (fairseq and old omegaconf read Optional[X])
import dataclasses
from dataclasses import dataclass, field
from typing import Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.utils import get_available_activation_fns

from normplugin.placement import (
    HEAD_SCALES,
    NORM_TYPES,
    QK_NORMS,
    SCHEMES,
    NormScheme,
    resolve_scheme,
)

# Upstream implements relu_squared (NormFormer's 2.7B recipe) and does not let it be chosen.
ACTIVATIONS = ChoiceEnum([*get_available_activation_fns(), "relu_squared"])
SIZES = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")  # in the order of `Dims`


def about(text: str, legal: tuple[str, ...] = ()) -> dict[str, str]:
    """Return a field's metadata: its help text, with the legal values."""
    return {"help": text + (f" ({', '.join(legal)})" if legal else "")}


def left_to_architecture(*names: str):
    """Declare fields of a config's bases again, with None for "as the architecture says".

    hydra fills in every default before it applies the architecture: one that is set would count as
    typed by the user. Decorate the class before `dataclass` does.
    """

    def declare(cls: type) -> type:
        inherited = {f.name: f for base in cls.__bases__[::-1] for f in dataclasses.fields(base)}
        for name in names:
            cls.__annotations__[name] = Optional[inherited[name].type]
            setattr(cls, name, field(default=None, metadata=inherited[name].metadata))
        return cls

    return declare


@dataclass
class SchemeConfig(FairseqDataclass):
    """Our options; a model's config has them before upstream's."""

    activation_fn: ACTIVATIONS = field(  # type: ignore[valid-type]
        default="relu", metadata=about("activation function to use")
    )
    norm_scheme: Optional[str] = field(
        default=None, metadata=about("where norms and learned scales sit", SCHEMES)
    )
    norm_type: Optional[str] = field(
        default=None, metadata=about("norm at every site; default layernorm", NORM_TYPES)
    )
    norm_eps: Optional[float] = field(
        default=None, metadata=about("added to the variance of every norm; default 1e-5")
    )
    norm_zero_centered: bool = field(
        default=False, metadata=about("store norm gains as offsets from 1")
    )
    head_scale: Optional[str] = field(
        default=None, metadata=about("learned scale per head; default: the scheme's", HEAD_SCALES)
    )
    residual_scale: bool = field(
        default=False, metadata=about("learn a vector on the FFN's skip path (ResScale)")
    )
    qk_norm: Optional[str] = field(
        default=None, metadata=about("norm of queries and keys; default: the scheme's", QK_NORMS)
    )
    embedding_norm: bool = field(default=False, metadata=about("norm on the embeddings"))
    output_norm_init: Optional[float] = field(
        default=None, metadata=about("starting gain of the output norms; default 1")
    )
    recompute_ffn_norm: bool = field(
        default=False,
        metadata=about("rebuild the FFN's normalised activation in the backward: less memory"),
    )


def scheme_of(cfg) -> NormScheme:
    """Return the checked scheme of a model config or of parsed arguments."""
    return resolve_scheme(
        getattr(cfg, "norm_scheme", None) or "preln",
        norm_type=getattr(cfg, "norm_type", None),
        norm_eps=getattr(cfg, "norm_eps", None),
        norm_zero_centered=getattr(cfg, "norm_zero_centered", False),
        head_scale=getattr(cfg, "head_scale", None),
        residual_scale=getattr(cfg, "residual_scale", False),
        qk_norm=getattr(cfg, "qk_norm", None),
        embedding_norm=getattr(cfg, "embedding_norm", False),
        output_norm_init=getattr(cfg, "output_norm_init", None),
    )
