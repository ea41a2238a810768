"""fairseq-train with diagnostics: the same command line and two options more.

    python -m normplugin.diagnostics.fairseq_train DATA ... --diagnostics-interval 100

Runs fairseq's own training in this process with its own trainer, which measures the first update
and every N-th one, for our models and for upstream's own. Records go to --diagnostics-file, and to
tensorboard where --tensorboard-logdir is given.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fairseq_cli import train  # isort: skip -- it sets up the log, in front of all of fairseq
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import progress_bar
from fairseq.trainer import Trainer
from torch import Tensor

from normplugin.diagnostics.batches import BatchHash
from normplugin.diagnostics.fairseq_map import map_model
from normplugin.diagnostics.options import DiagnosticsError, check_interval
from normplugin.diagnostics.session import Scalars, Session

PROGRAM = "normplugin.diagnostics.fairseq_train"
# Their gradients are flattened, sharded or local when they are clipped.
_UNSUPPORTED = ("fully_sharded", "slowmo")


def main(argv: Sequence[str] | None = None) -> int:
    """Train; return 0, or 2 for bad input."""
    parser = options.get_training_parser()
    group = parser.add_argument_group("diagnostics")
    group.add_argument("--diagnostics-interval", required=True, metavar="N")
    group.add_argument("--diagnostics-file", type=Path, metavar="PATH")
    args = options.parse_args_and_arch(parser, list(sys.argv[1:] if argv is None else argv))
    cfg = convert_namespace_to_omegaconf(args)
    try:
        path = args.diagnostics_file or Path(cfg.checkpoint.save_dir) / "diagnostics.jsonl"
        run = functools.partial(_run, check_interval(args.diagnostics_interval), path.absolute())
        _check(cfg)
        distributed_utils.call_main(cfg, run)
    except DiagnosticsError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(interval: int, path: Path, cfg) -> None:
    """fairseq's own main, in whichever process fairseq started."""
    train.Trainer = functools.partial(DiagnosticsTrainer, interval, path)
    train.main(cfg)


def _check(cfg) -> None:
    backend = cfg.distributed_training.ddp_backend
    if backend in _UNSUPPORTED:
        raise DiagnosticsError(
            f"--ddp-backend: got {backend!r} with --diagnostics-interval; it keeps no whole "
            "gradients. Take legacy_ddp or pytorch_ddp, or train without diagnostics."
        )
    for option, wrong in (
        ("--use-bmuf", cfg.optimization.use_bmuf),
        ("--model-parallel-size", cfg.common.model_parallel_size > 1),
    ):
        if wrong:
            raise DiagnosticsError(
                f"{option}: got it with --diagnostics-interval, which cannot measure it. "
                "Drop one of them."
            )


class DiagnosticsTrainer(Trainer):
    """fairseq's trainer, watched at some updates; what it computes is the same bit for bit.

    Args:
        interval: In updates.
        path: The file of the records.
        cfg: As fairseq's; so are args and kwargs.
    """

    def __init__(self, interval: int, path: Path, cfg, *args, **kwargs):
        super().__init__(cfg, *args, **kwargs)
        master = distributed_utils.is_master(cfg.distributed_training)
        scalars = _tensorboard(cfg.common.tensorboard_logdir) if master else None
        self._session = Session(map_model(self.get_model()), interval, path, scalars)
        self._batches: BatchHash | None = None

    def train_step(self, samples, raise_oom=False):
        """One update; measured where it is due."""
        number = self.get_num_updates() + 1
        if self._batches is None:  # a checkpoint has been loaded by now
            self._batches = BatchHash(self._session.interval, number - 1)
        self._batches.add(samples)
        with self._session.update(number) as measured:
            output = super().train_step(samples, raise_oom)
        done = self.get_num_updates() == number
        self._session.close(number, measured, done, self._batches)
        return output

    def clip_grad_norm(self, clip_norm):
        """Gradients are here summed over workers and normalised, and not yet clipped."""
        probe = self._session.probe
        if probe.attached:
            if self.is_data_parallel_master:  # every rank holds the same gradients
                probe.add_gradients(lambda p: p.grad, _unscaling(self.optimizer))
            probe.add_gains()
        return super().clip_grad_norm(clip_norm)

    def _prepare_sample(self, sample, is_dummy=False):
        sample, is_dummy_batch = super()._prepare_sample(sample, is_dummy)
        self._session.probe.paused = is_dummy_batch
        return sample, is_dummy_batch


def _unscaling(optimizer) -> Tensor | float:
    """What fairseq has yet to multiply the gradients of the model's parameters with.

    The 16-bit optimizers put off both the loss scale and the normalisation.
    """
    if hasattr(optimizer, "_multiply_factor"):
        return optimizer._multiply_factor
    if hasattr(optimizer, "_grad_scaler"):
        return 1.0 / optimizer.scaler.get_scale()
    return 1.0


def _tensorboard(folder: str | None) -> Scalars | None:
    """Return fairseq's tensorboard writer for a folder beside those of its own curves."""
    if not folder or progress_bar.SummaryWriter is None:
        return None
    writer = progress_bar.SummaryWriter(os.path.join(folder, "diagnostics"))

    def write(scalars: dict[str, float], update: int) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, update)
        writer.flush()

    return write


if __name__ == "__main__":
    sys.exit(main())
