"""Our options beside Megatron's own: the same names as in fairseq and on the command line.

    from normplugin.megatron_plugin.arguments import add_norm_arguments, scheme_from_args

``add_norm_arguments`` is an ``extra_args_provider`` for Megatron's parser. Type, eps and gain of
the norms are Megatron's own options; ours are other names for them and may not contradict them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from normplugin.errors import SchemeError
from normplugin.placement import (
    HEAD_SCALES,
    NORM_TYPES,
    QK_NORMS,
    SCHEMES,
    NormScheme,
    canonical_name,
    resolve_scheme,
)

CHOSEN_SPEC = ("normplugin.megatron_plugin.chosen", "chosen")
_SPECS = "normplugin.megatron_plugin.specs"
_NORMALIZATION = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_NORM_TYPE = {theirs: ours for ours, theirs in _NORMALIZATION.items()}

# Numbers and choices are read as text: resolve_scheme checks them and words the errors.
_OPTIONS: tuple[tuple[str, str], ...] = (
    ("norm_scheme", f"where norms and learned scales sit ({', '.join(SCHEMES)})"),
    ("norm_type", f"norm at every site ({', '.join(NORM_TYPES)}): Megatron's --normalization"),
    ("norm_eps", "added to the variance of every norm: Megatron's --norm-epsilon"),
    ("head_scale", f"learned scale per head; default: the scheme's ({', '.join(HEAD_SCALES)})"),
    ("qk_norm", f"norm of queries and keys; default: the scheme's ({', '.join(QK_NORMS)})"),
    ("output_norm_init", "starting gain of the output norms; default 1"),
)
_FLAGS: tuple[tuple[str, str], ...] = (
    ("norm_zero_centered", "store norm gains as offsets from 1: Megatron's --apply-layernorm-1p"),
    ("residual_scale", "learn a vector on the FFN's skip path (ResScale)"),
    ("embedding_norm", "norm on the embeddings"),
)
WARM_START = "norm_warm_start"
DIAGNOSTICS = ("diagnostics_interval", "diagnostics_file")
NAMES = tuple(name for name, _ in (*_OPTIONS, *_FLAGS))


def add_norm_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our options to Megatron's parser, or to any other, and return it.

    Raises:
        SchemeError: If the parser already has an option of one of these names.
    """
    taken = {word for action in parser._actions for word in (*action.option_strings, action.dest)}
    for name in (*NAMES, WARM_START, "cpu_emulation", *DIAGNOSTICS):
        if flag_of(name) in taken or name in taken:
            raise SchemeError(
                f"{flag_of(name)}: got an option of this name from Megatron or the script; legal "
                "is one meaning per name. Rename the script's, or update normplugin."
            )
    group = parser.add_argument_group(title="normplugin")
    for name, text in _OPTIONS:
        group.add_argument(flag_of(name), default=None, help=text)
    for name, text in _FLAGS:
        group.add_argument(flag_of(name), action="store_true", help=text)
    group.add_argument(
        flag_of(WARM_START),
        action="store_true",
        help="let --pretrained-checkpoint be one of Pre-LN; the added tensors start fresh",
    )
    group.add_argument(
        "--cpu-emulation", action="store_true", help="emulate CUDA on the CPU, to try a script"
    )
    group.add_argument(
        "--diagnostics-interval",
        metavar="N",
        help="measure the first iteration and every N-th: gradients, stream, sublayers, gains",
    )
    group.add_argument(
        "--diagnostics-file", metavar="PATH", help="where the measured numbers go, as JSON lines"
    )
    return parser


def flag_of(name: str) -> str:
    """Return the spelling of an option on the command line."""
    return "--" + name.replace("_", "-")


def split_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return our options and the words that are not ours, in their order.

    ``--spec normplugin.megatron_plugin.specs NAME`` is another spelling of ``--norm-scheme NAME``.

    Raises:
        SchemeError: For an option without its value, for ``--spec`` beside ``--norm-scheme``, and
            for an option that has no effect without a scheme.
    """
    ours, rest = add_norm_arguments(_Parser()).parse_known_args(list(argv))
    spec, without_spec = _peek(rest, "--spec", nargs="*")
    if spec is not None and ours.norm_scheme is not None:
        raise SchemeError(
            f"--norm-scheme: got {ours.norm_scheme!r} with --spec {' '.join(spec)}; both choose "
            "the layer. Drop one of them."
        )
    if spec and len(spec) == 2 and spec[0] == _SPECS:
        ours.norm_scheme, rest = spec[1].replace("_", "+"), without_spec
    given = [name for name in (*NAMES, WARM_START) if getattr(ours, name)]
    if given and ours.norm_scheme is None:
        raise SchemeError(
            f"{flag_of(given[0])}: got it without a scheme; it changes a scheme. "
            "Add --norm-scheme NAME."
        )
    return ours, rest


def megatron_flags(ours: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Check the scheme and return what Megatron's parser must be given for it.

    Raises:
        SchemeError: For an illegal scheme, and for a norm that contradicts Megatron's own options.
    """
    if ours.norm_scheme is None:
        return []
    scheme = resolve_scheme(ours.norm_scheme, **_keywords(ours))
    flags = ["--spec", *CHOSEN_SPEC]
    if ours.norm_type is not None:
        wanted = _NORMALIZATION[scheme.norm.type]
        flags += _agree("--norm-type", ours.norm_type, "--normalization", wanted, rest)
    if ours.norm_eps is not None:
        flags += _agree("--norm-eps", ours.norm_eps, "--norm-epsilon", str(scheme.norm.eps), rest)
    if ours.norm_zero_centered and "--apply-layernorm-1p" not in rest:
        flags.append("--apply-layernorm-1p")
    if ours.qk_norm == "none" and "--qk-layernorm" in rest:
        raise SchemeError(
            "--qk-norm: got 'none' with --qk-layernorm, which asks for one. Drop one of them."
        )
    # Megatron sums the gradients of q_layernorm and k_layernorm over TP only with its option on.
    if scheme.qk_norm == "head" and "--qk-layernorm" not in rest:
        flags.append("--qk-layernorm")
    if getattr(ours, WARM_START):
        if _peek(rest, "--pretrained-checkpoint")[0] is None:
            raise SchemeError(
                "--norm-warm-start: got it without a checkpoint to start from. "
                "Add --pretrained-checkpoint DIR."
            )
        flags += ["--dist-ckpt-strictness", "log_unexpected"]  # the added tensors are not in it
    return flags


def scheme_from_args(args: Any) -> NormScheme:
    """Return the scheme of Megatron's parsed arguments, ours among them.

    Raises:
        SchemeError: For an illegal mix, or a normalization that is none of ours.
    """
    if args.normalization not in _NORM_TYPE:
        raise SchemeError(
            f"--normalization: got {args.normalization!r}; legal are {', '.join(_NORM_TYPE)}. "
            "Take one of them, or Megatron's own spec."
        )
    keywords = _keywords(args)
    keywords["norm_type"] = _NORM_TYPE[args.normalization]
    keywords["norm_eps"] = args.layernorm_epsilon
    keywords["norm_zero_centered"] = args.layernorm_zero_centered_gamma
    if keywords["qk_norm"] is None and args.qk_layernorm and not args.multi_latent_attention:
        if canonical_name(args.norm_scheme) != "outputln":  # complete_scheme refuses that mix
            keywords["qk_norm"] = "head"
    return resolve_scheme(args.norm_scheme, **keywords)


def _keywords(args: Any) -> dict[str, Any]:
    """The options on top of the scheme, as resolve_scheme takes them."""
    found = {name: getattr(args, name, None) for name in NAMES if name != "norm_scheme"}
    return {**found, **{name: bool(found[name]) for name, _ in _FLAGS}}


class _Parser(argparse.ArgumentParser):
    """Knows only what it is given; its errors are ours."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str):  # type: ignore[override]
        message = message.removeprefix("argument ")
        raise SchemeError(f"{message}. Give it one, or drop it.")


def _peek(words: Sequence[str], flag: str, **kwargs: Any) -> tuple[Any, list[str]]:
    """Return the value of one of Megatron's options, or None, and the words without it."""
    parser = _Parser()
    parser.add_argument(flag, default=None, dest="value", **kwargs)
    found, rest = parser.parse_known_args(list(words))
    return found.value, rest


def _agree(option: str, value: str, theirs: str, wanted: str, rest: Sequence[str]) -> list[str]:
    """Return Megatron's option for ours, or nothing where the user gave it the same value."""
    got, _ = _peek(rest, theirs)
    if got is None:
        return [theirs, wanted]
    if not _equal(got, wanted):
        raise SchemeError(
            f"{option}: got {value!r} with {theirs} {got}; both set the same thing. "
            "Drop one of them."
        )
    return []


def _equal(left: str, right: str) -> bool:
    try:
        return float(left) == float(right)
    except ValueError:
        return left == right
