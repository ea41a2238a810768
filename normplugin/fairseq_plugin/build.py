"""Builds a model from a command line without data, to look at it."""

from __future__ import annotations

from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import BaseFairseqModel
from fairseq.tasks import TASK_REGISTRY
from torch._subclasses.fake_tensor import FakeTensorMode

from normplugin.fairseq_plugin.checks import TASKS


def build_from_arguments(argv: list[str], kind: str) -> BaseFairseqModel:
    """Build the model ``fairseq-train`` builds from these options, with an empty dictionary.

    Its tensors are fake and take no memory, so that the largest architecture can be looked at.
    (Upstream's BERT initialiser copies through the CPU, which the meta device cannot.)
    """
    task = TASKS[kind][0]
    parser = options.get_training_parser(default_task=task)
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, ["", *argv]))
    dictionaries = [Dictionary() for _ in range(1 if kind == "masked_lm" else 2)]
    with FakeTensorMode():
        return TASK_REGISTRY[task](cfg.task, *dictionaries).build_model(cfg.model)
