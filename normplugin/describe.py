"""Show every norm and learned scale of a scheme, an architecture or a checkpoint.

Examples:
  normplugin describe periln
  normplugin describe normformer_355m
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
from normplugin.presets import ARCHITECTURES, CAUSAL_SIZES, LISTING

if TYPE_CHECKING:
    from normplugin.fairseq_plugin.checkpoint import Card

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
        scheme, dims, kind = _named(args)
        report = _report(scheme, dims, kind)
        if args.build:
            report["built"] = _built(args, scheme, dims)
    else:
        from normplugin.fairseq_plugin.checkpoint import inspect

        found = inspect(args.what, trust=args.trust)
        card: Card = found.card
        report = _report(card.scheme, card.dims, card.kind) | {"checkpoint": found.facts()}
    print(json.dumps(report, indent=2) if args.json else _text(report))
    return 0 if not report.get("checkpoint", {}).get("missing") else 1


def _names() -> str:
    lines = ["schemes (--norm-scheme):"]
    for name in SCHEMES:
        sites = ", ".join(str(site) for site in resolve_scheme(name).layer_sites())
        lines.append(f"  {name:<12} {sites}")
    lines.append("\nsizes (--arch SCHEME or SCHEME_SIZE; layers, width, FFN width, heads):")
    for suffix, dims in CAUSAL_SIZES.items():
        sizes = " ".join(f"{value:>6}" for value in vars(dims).values())
        lines.append(f"  {suffix or '(none)':<12} {sizes}")
    return "\n".join(lines)


def _looks_like_file(what: str) -> bool:
    return Path(what).exists() or what.endswith(".pt") or "/" in what


def _named(args: argparse.Namespace) -> tuple[NormScheme, Dims | None, str]:
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
    return scheme, arch.dims if arch else None, arch.kind if arch else "causal_lm"


def _built(args: argparse.Namespace, scheme: NormScheme, dims: Dims | None) -> dict:
    """What fairseq really builds, by counting; the build itself compares it with the promise."""
    if dims is None:
        raise SchemeError(f"--build: got scheme {args.what!r} without a size. Name an --arch.")
    from normplugin.fairseq_plugin.models import build_from_arguments
    from normplugin.fairseq_plugin.sites import promised

    argv = ["--arch", args.what]
    for name in _OPTIONS:
        value = getattr(args, name)
        if value not in (None, False):
            argv += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    shapes = {name: tuple(p.shape) for name, p in build_from_arguments(argv).named_parameters()}
    found = {name for name, shape in promised(scheme, dims).items() if shapes.get(name) == shape}
    return {
        "norm_and_scale_tensors": f"{len(found)} of {len(promised(scheme, dims))} promised",
        "norm_and_scale_parameters": sum(shapes[name][0] for name in found),
    }


def _report(scheme: NormScheme, dims: Dims | None, kind: str) -> dict:
    sites = [*scheme.layer_sites(), *scheme.stack_sites()]
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
            for site in sites
        ],
    }
    if dims is not None:
        layer = sum(scheme.count(s, dims) for s in scheme.layer_sites())
        stack = sum(scheme.count(s, dims) for s in scheme.stack_sites())
        report["sizes"] = vars(dims)
        report["norm_parameters"] = {
            "per_layer": layer,
            "stack": stack,
            "total": dims.n_layers * layer + stack,
        }
        report["architecture_hash"] = architecture_hash(scheme, dims, kind)
    return report


def _text(report: dict) -> str:
    lines = [f"scheme {report['scheme']}: {report['norm']}; {report['kind']}"]
    if "sizes" in report:
        lines.append(", ".join(f"{name} {value}" for name, value in report["sizes"].items()))
    lines.append("")
    for site in report["sites"]:
        count = "" if site["count"] is None else f"{site['count']:>8,}"
        cells = (site["site"], site["formula"], "+".join(site["parameters"]), site["shape"])
        lines.append("  {:<20} {:<36} {:<15} {:<12}".format(*cells) + count)
    if "norm_parameters" in report:
        counts = report["norm_parameters"]
        lines += [
            "",
            f"norm and scale parameters: {counts['per_layer']:,} per layer, "
            f"{counts['stack']:,} outside, {counts['total']:,} in all",
            f"architecture hash: {report['architecture_hash']}",
        ]
    for name, value in {**report.get("built", {}), **report.get("checkpoint", {})}.items():
        lines.append(f"{name.replace('_', ' ')}: {value}")
    return "\n".join(lines)
