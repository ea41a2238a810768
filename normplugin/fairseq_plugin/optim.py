"""Adam that spares norm gains and learned scales from weight decay.

fairseq decays every parameter. ``--optimizer adam_decay_exempt`` is fairseq's Adam with a second
parameter group of decay 0; Megatron-Core exempts all vectors (``--no-decay vectors``).
"""

# No postponed annotations: fairseq reads the types of dataclass fields.
import logging
from dataclasses import dataclass, field

from fairseq.dataclass import ChoiceEnum
from fairseq.optim import register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig

from normplugin.errors import SchemeError
from normplugin.fairseq_plugin.checkpoint import EXEMPT_OPTIMIZER as NAME
from normplugin.fairseq_plugin.sites import NORM_MARK

logger = logging.getLogger(__name__)
EXEMPT = ("norms", "vectors")


@dataclass
class DecayExemptAdamConfig(FairseqAdamConfig):
    """fairseq's Adam options and what to exempt."""

    no_decay: ChoiceEnum(EXEMPT) = field(  # type: ignore[valid-type]
        default="norms",
        metadata={
            "help": "without weight decay: norm gains, norm biases and learned scales (norms), or "
            "every parameter with at most one axis, linear biases included (vectors)"
        },
    )


@register_optimizer(NAME, dataclass=DecayExemptAdamConfig)
class DecayExemptAdam(FairseqAdam):
    """fairseq's Adam with norms and scales in a group of weight decay 0.

    Raises:
        SchemeError: If the parameters arrive as one flat tensor or as unmarked copies.
    """

    def __init__(self, cfg: DecayExemptAdamConfig, params):
        super().__init__(cfg, _groups(list(params), str(cfg.no_decay)))
        self._spare()

    def load_state_dict(self, state_dict, optimizer_overrides=None):
        """Load, and spare again: fairseq writes the configured decay over every group."""
        super().load_state_dict(state_dict, optimizer_overrides)
        self._spare()

    def _spare(self) -> None:
        self.optimizer.param_groups[1]["weight_decay"] = 0.0


def _groups(params: list, exempt: str) -> list[dict]:
    if exempt == "vectors":
        spared = [p for p in params if p.ndim <= 1]
    else:
        spared = [p for p in params if getattr(p, NORM_MARK, False)]
    flat = len(params) == 1 and params[0].ndim == 1
    if flat or not spared:
        raise SchemeError(
            f"--optimizer {NAME}: got {len(params)} parameter(s) without marks; --fp16 and --bf16 "
            "flatten or copy them. Add --memory-efficient-fp16 (or -bf16), or --no-decay vectors "
            "with --fp16-no-flatten-grads; with an upstream --arch take --no-decay vectors."
        )
    marked = {id(p) for p in spared}
    decayed = [p for p in params if id(p) not in marked]
    logger.info(
        "weight decay on %d tensors (%d parameters), none on %d tensors (%d parameters)",
        len(decayed),
        sum(p.numel() for p in decayed),
        len(spared),
        sum(p.numel() for p in spared),
    )
    return [{"params": decayed}, {"params": spared}]
