"""Pretrain a GPT with Megatron's own trainer, from the wheel alone.

    torchrun --nproc-per-node 8 -m normplugin.megatron_plugin.pretrain_gpt \
        --norm-scheme normformer --train-data-path DIR/megatron/train_text_document ...

Takes all of Megatron's options and ours; ``--cpu-emulation`` runs it without a GPU. Without
``--norm-scheme`` and ``--spec`` it trains Megatron's own model, the baseline. For what Megatron's
larger script has besides (multi-token prediction, distillation, fine-tuning data), run that one
under ``normplugin.megatron_plugin.launch``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from normplugin.errors import MissingFrameworkError
from normplugin.megatron_plugin.arguments import split_options
from normplugin.megatron_plugin.launch import reported, show_help, start, watch

PROGRAM = "normplugin.megatron_plugin.pretrain_gpt"


def main(argv: Sequence[str] | None = None) -> int:
    """Train; return 0, or 2 for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ("-h", "--help"):
        show_help(f"torchrun ... -m {PROGRAM} [options] [Megatron's options]", __doc__)
        return 0
    return reported(PROGRAM, lambda: train(words))


def train(words: Sequence[str], watched: Callable[[argparse.Namespace], None] = watch) -> None:
    """Train as the words say; ``watched`` is given our options before Megatron begins."""
    ours, rest = split_options(words)
    sys.argv = [PROGRAM, *words, *start(ours, rest)]
    if ours.norm_scheme is not None:
        # It may have come as --spec with one of our constants; of two --spec the later one wins.
        sys.argv += ["--norm-scheme", ours.norm_scheme]
    try:
        import megatron.training  # noqa: F401 -- is it there at all
    except ModuleNotFoundError as error:
        raise MissingFrameworkError(
            f"megatron.training: it cannot be imported ({error}); megatron-core's wheels hold it "
            "from 0.17 on. Install it: pip install 'normplugin[megatron]' on Python 3.12."
        ) from error
    from normplugin.megatron_plugin.gpt import pretrain_gpt

    watched(ours)
    pretrain_gpt()


if __name__ == "__main__":
    sys.exit(main())
