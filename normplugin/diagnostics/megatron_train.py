"""Megatron's trainer with diagnostics: ``--diagnostics-interval N --diagnostics-file PATH``.

Opt-in, in a process of its own, like the CPU emulation: it stands in front of Megatron's function
for one update. Gradients are measured when Megatron calls ``optimizer.step``: finalised (summed
over micro-batches and ranks, normalised), neither unscaled nor clipped. Written against
``megatron.training`` of megatron-core 0.17 to 0.19.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.training import get_args, get_tensorboard_writer, training
from torch import Tensor, nn

from normplugin.diagnostics.batches import BatchHash
from normplugin.diagnostics.megatron_map import map_model
from normplugin.diagnostics.options import DiagnosticsError
from normplugin.diagnostics.session import Scalars, Session

# Megatron's argument -> the values under which its gradients or forward passes can be seen.
_SUPPORTED = {
    "use_megatron_fsdp": (False,),
    "use_torch_fsdp2": (False,),
    "num_distributed_optimizer_instances": (1,),
    "enable_cuda_graph": (False,),
    "external_cuda_graph": (False,),
    "cuda_graph_impl": ("none",),
}


def install(interval: int, path: Path, dropout: bool = True) -> None:
    """Measure every run of Megatron's trainer in this process, also with its dropout off."""
    step = training.train_step
    training.train_step = functools.wraps(step)(_Watched(step, interval, path, dropout))


class _Watched:
    """Megatron's ``train_step``, measured where it is due."""

    def __init__(self, step: Callable[..., Any], interval: int, path: Path, dropout: bool):
        self.step, self.interval, self.path, self.dropout = step, interval, path, dropout
        self.session: Session | None = None
        self.batches: BatchHash | None = None

    def __call__(self, *args, **kwargs):
        given = inspect.signature(self.step).bind(*args, **kwargs).arguments
        model, optimizer = given["model"], given["optimizer"]
        for part in model if not self.dropout else ():
            part.eval()
        number = get_args().curr_iteration + 1
        if self.session is None:
            _check(get_args())
            self.session = Session(map_model(model), self.interval, self.path, _tensorboard())
            self.batches = _hashed(given["data_iterator"], BatchHash(self.interval, number - 1))
        with self.session.update(number) as measured:
            with _measured_step(optimizer, self.session) if measured else contextlib.nullcontext():
                result = self.step(*args, **kwargs)
        skipped = bool(result[1])  # Megatron's skipped_iter
        self.session.close(number, measured, not skipped, self.batches)
        return result


def _check(args: Any) -> None:
    for name, legal in _SUPPORTED.items():
        value = getattr(args, name, legal[0])
        if value not in legal:
            raise DiagnosticsError(
                f"--{name.replace('_', '-')}: got {value!r} with --diagnostics-interval, which "
                "cannot measure it. Drop one of them."
            )


def _hashed(iterator: Any, batches: BatchHash) -> BatchHash | None:
    """Show every batch to the hash, once; None on a rank that is given no data.

    The iterator's type is Megatron's and stays (it can replay); a list has one per model chunk.
    """
    first = iterator[0] if isinstance(iterator, list) else iterator
    if first is None:
        return None
    first.iterable = batches.watch(first.iterable)
    return batches


@contextlib.contextmanager
def _measured_step(optimizer: Any, session: Session) -> Iterator[None]:
    """Measure in front of this optimizer's next step."""
    step = optimizer.step

    def measure_and_step():
        unscaling = 1.0 / optimizer.get_loss_scale().reshape(())
        session.probe.add_gradients(_owned_gradient(optimizer), unscaling)
        session.probe.add_gains()
        return step()

    optimizer.step = measure_and_step
    try:
        yield
    finally:
        del optimizer.step


def _owned_gradient(optimizer: Any) -> Callable[[nn.Parameter], Tensor | None]:
    """Return a function: the part of a parameter's gradient that only this rank adds.

    Tensors that pipeline or tensor parallelism repeats are left to one rank. Of the distributed
    optimizer's gradients each rank holds a shard that is right; of others every data-parallel rank
    holds the whole.
    """
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    sharded = [part for part in chained if isinstance(part, DistributedOptimizer)]
    shards = {
        parameter: part._get_model_param_range_map(parameter)["param"]
        for part in sharded
        for parameter in getattr(part, "model_param_gbuf_map", ())
    }

    def gradient(parameter: nn.Parameter) -> Tensor | None:
        found = getattr(parameter, "main_grad", parameter.grad)
        if found is None or not param_is_not_tensor_parallel_duplicate(parameter):
            return None
        if not sharded:
            return found if _is_first_replica(parameter) else None
        shard = shards.get(parameter)
        return None if shard is None else found.view(-1)[shard.start : shard.end]

    return gradient


def _is_first_replica(parameter: nn.Parameter) -> bool:
    if not getattr(parameter, "allreduce", True):  # an expert's
        return parallel_state.get_expert_data_parallel_rank() == 0
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def _tensorboard() -> Scalars | None:
    """Megatron's own writer, which its last rank has."""
    writer = get_tensorboard_writer()
    if writer is None:
        return None

    def write(scalars: dict[str, float], update: int) -> None:
        for name, value in scalars.items():
            writer.add_scalar(f"diagnostics/{name}", value, update)

    return write
