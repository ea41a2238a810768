"""Megatron's own trainer without a GPU: what of CUDA is emulated, all of it, is in this file.

For trying launch scripts, layouts and checkpoints on a laptop; it says nothing about speed. Opt-in
(``--cpu-emulation``), before Megatron is imported, in a process of its own: it replaces functions
of torch and of Megatron for good, which the rest of this package never does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger("normplugin")
BANNER = """
************************************************************************
* --cpu-emulation: CUDA is emulated on the CPU. This is for trying     *
* launch scripts and layouts only: no speed, memory or numerical       *
* behaviour of a GPU can be read off this run.                         *
************************************************************************"""

# What a CPU run needs of Megatron's options. Fused kernels and Transformer Engine need a GPU.
DEFAULT_FLAGS: tuple[tuple[str, ...], ...] = (
    ("--distributed-backend", "gloo"),
    ("--transformer-impl", "local"),
    ("--use-cpu-initialization",),
    ("--attention-backend", "unfused"),
    ("--num-workers", "0"),
    ("--eval-interval", "1000"),
    ("--no-masked-softmax-fusion",),
    ("--no-bias-gelu-fusion",),
    ("--no-bias-swiglu-fusion",),
    ("--no-bias-dropout-fusion",),
    ("--no-gradient-accumulation-fusion",),
    ("--no-persist-layer-norm",),
    ("--no-rope-fusion",),
)


def default_flags(given: Sequence[str]) -> list[str]:
    """Return the flags a CPU run needs and the user has not given."""
    names = {word.partition("=")[0] for word in given}
    return [word for flag in DEFAULT_FLAGS if flag[0] not in names for word in flag]


def enable() -> None:
    """Emulate CUDA on the CPU from here on, in this process.

    Raises:
        RuntimeError: If Megatron was imported before: it has then seen a machine without CUDA.
    """
    if "megatron.core" in sys.modules:
        raise RuntimeError("CPU emulation: Megatron is already imported. Enable it before.")
    if os.environ.get("RANK", "0") == "0":
        logger.warning(BANNER)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # asserted with tensor parallelism
    os.environ["TORCHDYNAMO_DISABLE"] = os.environ["TORCH_COMPILE_DISABLE"] = "1"
    import torch

    _replace_device(torch)
    _replace_inert(torch)
    _replace_random(torch)
    _replace_optimizer_checks(torch)
    _cuda_to_cpu_mode(torch).__enter__()
    _replace_in_megatron(torch)


class _Inert:
    """A stream or an event that is always done; also the context manager of either."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.cuda_stream = self.device_index = self.stream_id = 0

    def __enter__(self):
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _always({"query": True, "elapsed_time": 0.0}.get(name))


def _always(value: Any = None) -> Callable[..., Any]:
    """Return a function of its own: torch._dynamo tells torch's functions apart by identity."""
    return lambda *args, **kwargs: value


def _replace_device(torch: Any) -> None:
    """One "GPU" per process of this node, all of them the CPU."""
    cuda = torch.cuda
    count = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    properties = types.SimpleNamespace(
        name="CPU", major=8, minor=0, total_memory=1 << 34, multi_processor_count=1
    )
    cuda.current_device = lambda: torch.device("cpu")  # Megatron passes it on as device=
    for name in ("is_available", "is_initialized", "is_bf16_supported"):
        setattr(cuda, name, _always(True))
    cuda.device_count = lambda: count
    cuda.get_device_capability = lambda *args: (properties.major, properties.minor)
    cuda.get_device_properties = lambda *args: properties
    cuda.get_device_name = lambda *args: properties.name
    cuda.mem_get_info = lambda *args: (properties.total_memory, properties.total_memory)
    cuda.memory_stats = lambda *args: defaultdict(int)
    for kind in ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Byte", "Bool"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))


def _replace_inert(torch: Any) -> None:
    """What has nothing to do on a CPU: streams, events, caches, memory figures."""
    cuda = torch.cuda
    for name in (
        "set_device synchronize empty_cache ipc_collect reset_peak_memory_stats "
        "reset_max_memory_allocated set_stream _lazy_init init"
    ).split():
        setattr(cuda, name, _always())
    for name in (
        "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
    ).split():
        zero = _always(0)
        setattr(cuda, name, zero)
        setattr(cuda.memory, name, zero)
    for name in ("Event", "Stream", "current_stream", "default_stream", "stream", "device"):
        setattr(cuda, name, _Inert)
    cuda.is_current_stream_capturing = _always(False)
    torch.accelerator.current_stream = _Inert
    # `from torch.cuda import _lazy_call` defers a call until CUDA is up: that is now.
    cuda._lazy_call = lambda function, **kwargs: function()


def _replace_random(torch: Any) -> None:
    """The GPU's random state is the CPU's."""
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device="cuda": torch.get_rng_state()
        module.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
        # Not torch.manual_seed, which calls torch.cuda.manual_seed_all.
        module.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
        module.manual_seed_all = module.manual_seed


def _replace_optimizer_checks(torch: Any) -> None:
    name = "_accelerator_graph_capture_health_check"
    if hasattr(torch.optim.Optimizer, name):  # torch 2.9 and later
        setattr(torch.optim.Optimizer, name, _always())


def _cuda_to_cpu_mode(torch: Any) -> contextlib.AbstractContextManager:
    """Return a mode in which tensors asked for on, or sent to, a CUDA device stay on the CPU."""
    cpu = torch.device("cpu")

    def is_cuda(value: Any) -> bool:
        kind = value.partition(":")[0] if isinstance(value, str) else getattr(value, "type", None)
        return kind == "cuda" and isinstance(value, (str, torch.device))

    class CudaToCpu(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
                return args[0]
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                # megatron/core/optimizer/clip_grads.py asserts the CUDA name.
                return func(*args).replace("torch.", "torch.cuda.")
            if is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": cpu}
            return func(*(cpu if is_cuda(arg) else arg for arg in args), **kwargs)

    return CudaToCpu()


def _replace_in_megatron(torch: Any) -> None:
    """Megatron's own places that know no CPU."""
    from megatron.core.datasets import utils
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import transformer_block

    from normplugin.megatron_plugin.norms import MegatronNorm

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        # The wheel ships the compiled helper and no Makefile, for want of which Megatron exits.
        utils.compile_helpers = _always()
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # Its warning that the CPU's random state changed with the GPU's: here they are one.
    log = logging.getLogger(random.__name__)
    log.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    # The final norm of a bare layer spec: torch's asserts that there is no sequence parallelism.
    transformer_block.LayerNormImpl = MegatronNorm
