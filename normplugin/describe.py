"""Show every norm and learned scale of a scheme, an architecture or a checkpoint.

Examples:
  normplugin describe periln
  normplugin describe normformer_355m
  normplugin describe periln_mt --build
  normplugin describe checkpoints/checkpoint_last.pt
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from normplugin.errors import SchemeError, unknown_value
from normplugin.placement import (
    LETTERS,
    SCHEMES,
    Dims,
    NormScheme,
    architecture_hash,
    resolve_scheme,
)
from normplugin.presets import ARCHITECTURES, LISTING, SIZES, Architecture

if TYPE_CHECKING:
    from normplugin.fairseq_plugin.checkpoint import Card

Stacks = dict[str, Dims]  # "encoder", "decoder" or both, with their sizes

_STACKS = {
    "causal_lm": ("decoder",),
    "masked_lm": ("encoder",),
    "encoder_decoder": ("encoder", "decoder"),
}
_OPTIONS = (
    "norm_type",
    "norm_eps",
    "norm_zero_centered",
    "head_scale",
    "residual_scale",
    "qk_norm",
    "embedding_norm",
    "output_norm_init",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to describe and the options that go on top of a scheme or architecture."""
    parser.add_argument(
        "what", metavar="SCHEME|ARCH|CHECKPOINT", nargs="?", help="without it: all legal names"
    )
    parser.add_argument(
        "--trust", action="store_true", help="a checkpoint of your own may run code"
    )
    parser.add_argument(
        "--build", action="store_true", help="build the architecture in fairseq and look at it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    group = parser.add_argument_group("on top of a scheme or architecture")
    group.add_argument("--norm-type", help="layernorm or rmsnorm")
    group.add_argument("--norm-eps", type=float, help="added to the variance")
    group.add_argument("--norm-zero-centered", action="store_true", help="gains are offsets from 1")
    group.add_argument("--head-scale", help="none, before-out-proj or after-out-proj")
    group.add_argument(
        "--residual-scale", action="store_true", help="vector on the FFN's skip path"
    )
    group.add_argument("--qk-norm", help="none, head or full")
    group.add_argument("--embedding-norm", action="store_true", help="norm on the embeddings")
    group.add_argument("--output-norm-init", type=float, help="starting gain of the output norms")


def run(args: argparse.Namespace) -> int:
    """Describe; return 1 if a checkpoint lacks what it promises."""
    if args.what is None:
        print(_names())
        return 0
    if args.what in ARCHITECTURES or not _looks_like_file(args.what):
        scheme, arch = _named(args)
        kind = arch.kind if arch else "causal_lm"
        report = _report(scheme, _stacks(arch), kind)
        if args.build:
            report["built"] = _built(args, kind, _stacks(arch))
    else:
        from normplugin.fairseq_plugin.checkpoint import inspect

        found = inspect(args.what, trust=args.trust)
        cards: list[Card] = list(found.cards.values())
        stacks = dict(zip(_STACKS[cards[0].kind], (card.dims for card in cards), strict=True))
        report = _report(cards[0].scheme, stacks, cards[0].kind) | {"checkpoint": found.facts()}
    print(json.dumps(report, indent=2) if args.json else _text(report))
    return 0 if not report.get("checkpoint", {}).get("missing") else 1


def _names() -> str:
    lines = ["schemes (--norm-scheme):"]
    for name in SCHEMES:
        sites = ", ".join(str(site) for site in resolve_scheme(name).layer_sites())
        lines.append(f"  {name:<12} {sites}")
    for kind, sizes in SIZES.items():
        lines.append(f"\n{kind} (--arch SCHEME or SCHEME_SIZE; layers, width, FFN width, heads):")
        for suffix, dims in sizes.items():
            numbers = " ".join(f"{value:>6}" for value in vars(dims).values())
            lines.append(f"  {suffix or '(none)':<12} {numbers}")
    return "\n".join(lines)


def _looks_like_file(what: str) -> bool:
    return Path(what).exists() or what.endswith(".pt") or "/" in what


def _stacks(arch: Architecture | None) -> Stacks:
    return dict.fromkeys(_STACKS[arch.kind], arch.dims) if arch else {}


def _named(args: argparse.Namespace) -> tuple[NormScheme, Architecture | None]:
    options = {name: getattr(args, name) for name in _OPTIONS}
    arch = ARCHITECTURES.get(args.what)
    if args.what in SCHEMES or arch is None:
        try:
            # "periln" is a scheme and an architecture: with its sizes it says more.
            scheme = resolve_scheme(args.what, **options)
        except SchemeError as error:
            if str(error).startswith("--norm-scheme"):
                names = (*SCHEMES, *ARCHITECTURES)
                legal = f"letters ({', '.join(LETTERS)}); {LISTING}"
                message = unknown_value("SCHEME|ARCH", args.what, names, legal)
                raise SchemeError(message) from None
            raise
    else:
        scheme = resolve_scheme(arch.scheme, **options)
    return scheme, arch


def _built(args: argparse.Namespace, kind: str, stacks: Stacks) -> dict:
    """What fairseq really builds, by counting; the build itself compares it with the promise."""
    if not stacks:
        raise SchemeError(f"--build: got scheme {args.what!r} without a size. Name an --arch.")
    from normplugin.fairseq_plugin.build import build_from_arguments
    from normplugin.fairseq_plugin.checkpoint import promised_by

    argv = ["--arch", args.what]
    for name in _OPTIONS:
        value = getattr(args, name)
        if value not in (None, False):
            argv += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    model = build_from_arguments(argv, kind)
    promise = promised_by({path: m.card for path, m in model.named_modules() if hasattr(m, "card")})
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = [name for name, shape in promise.items() if shapes.get(name) == shape]
    return {
        "norm_and_scale_tensors": f"{len(found)} of {len(promise)} promised",
        "norm_and_scale_parameters": sum(shapes[name][0] for name in found),
    }


def _report(scheme: NormScheme, stacks: Stacks, kind: str) -> dict:
    cross = kind == "encoder_decoder"
    dims = next(iter(stacks.values()), None)
    report: dict = {
        "scheme": scheme.name,
        "norm": f"{scheme.norm.type}, eps {scheme.norm.eps:g}"
        + (", gain 1 + weight" if scheme.norm.zero_centered else ""),
        "kind": kind,
        "sites": [
            {
                "site": str(site),
                "formula": site.formula,
                "parameters": list(scheme.site_parameters(site)),
                "shape": f"({site.width},)" if dims is None else f"({dims.width(site.width)},)",
                "count": None if dims is None else scheme.count(site, dims),
            }
            for site in (*scheme.layer_sites(cross), *scheme.stack_sites())
        ],
    }
    if stacks:
        report["sizes"] = {name: vars(dims) for name, dims in stacks.items()}
        counts = {
            name: _counts(scheme, dims, cross and name == "decoder")
            for name, dims in stacks.items()
        }
        report["norm_parameters"] = {
            **counts,
            "total": sum(count["total"] for count in counts.values()),
        }
        hashes = [architecture_hash(scheme, dims, kind) for dims in stacks.values()]
        report["architecture_hash"] = " ".join(dict.fromkeys(hashes))
    return report


def _counts(scheme: NormScheme, dims: Dims, cross_attention: bool) -> dict[str, int]:
    layer = sum(scheme.count(site, dims) for site in scheme.layer_sites(cross_attention))
    stack = sum(scheme.count(site, dims) for site in scheme.stack_sites())
    return {"per_layer": layer, "stack": stack, "total": dims.n_layers * layer + stack}


def _text(report: dict) -> str:
    lines = [f"scheme {report['scheme']}: {report['norm']}; {report['kind']}"]
    for stack, sizes in report.get("sizes", {}).items():
        lines.append(f"{stack}: {', '.join(f'{name} {size}' for name, size in sizes.items())}")
    lines.append("")
    for site in report["sites"]:
        count = "" if site["count"] is None else f"{site['count']:>8,}"
        cells = (site["site"], site["formula"], "+".join(site["parameters"]), site["shape"])
        lines.append("  {:<22} {:<36} {:<15} {:<12}".format(*cells) + count)
    if "norm_parameters" in report:
        lines += ["", f"norm and scale parameters: {report['norm_parameters']['total']:,} in all"]
        for stack in report["sizes"]:
            counts = report["norm_parameters"][stack]
            numbers = f"{counts['per_layer']:,} per layer, {counts['stack']:,} outside"
            lines.append(f"  {stack}: {numbers}, {counts['total']:,} together")
        lines.append(f"architecture hash: {report['architecture_hash']}")
    for name, value in {**report.get("built", {}), **report.get("checkpoint", {})}.items():
        lines.append(f"{name.replace('_', ' ')}: {value}")
    return "\n".join(lines)
