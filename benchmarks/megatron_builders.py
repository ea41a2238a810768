"""Builds the Megatron layers that are compared: its own local spec, and every scheme on top."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random as tp_random
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from normplugin.megatron_plugin.norms import MegatronNorm
from normplugin.megatron_plugin.specs import scheme_spec
from normplugin.placement import Dims

STOCK = "stock local"
VARIANTS = (STOCK, "preln", "periln", "normformer", "outputln", "postln")


@contextlib.contextmanager
def process_groups(
    rank: int = 0, world: int = 1, store: str | None = None, device: str = "cpu"
) -> Iterator[None]:
    """Megatron's process groups over gloo with TP = world, for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        place = f"file://{store or os.path.join(folder, 'store')}"
        torch.distributed.init_process_group(
            "gloo", init_method=place, rank=rank, world_size=world, timeout=timedelta(minutes=2)
        )
        stack.callback(torch.distributed.destroy_process_group)
        if device == "cpu":  # Megatron allocates there, and keeps random states there
            patch = mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu"))
            stack.enter_context(patch)
            stack.enter_context(_no_random_states())
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
        stack.callback(parallel_state.destroy_model_parallel)
        if device != "cpu":
            tp_random.model_parallel_cuda_manual_seed(1)
        yield


def _no_random_states() -> contextlib.ExitStack:
    """Nothing draws from them: there is no dropout."""
    tracker = mock.Mock(fork=lambda *_: contextlib.nullcontext())
    stack = contextlib.ExitStack()
    name = "_CUDA_RNG_STATE_TRACKER"
    stack.enter_context(mock.patch.object(tp_random, name, tracker))
    stack.enter_context(mock.patch.object(tp_random, name + "_INITIALIZED", True))
    return stack


def build_layer(
    name: str, dims: Dims, tp: int = 1, sequence_parallel: bool = False, dtype=torch.float32
) -> nn.Module:
    """The first of several layers; without dropout and optional fusions, with biases and GELU."""
    config = TransformerConfig(
        num_layers=max(dims.n_layers, 2),  # postln's last layer lacks a norm
        hidden_size=dims.d_model,
        ffn_hidden_size=dims.d_ffn,
        num_attention_heads=dims.n_heads,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        transformer_impl="local",
        attention_softmax_in_fp32=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        activation_func=torch.nn.functional.gelu,
        add_bias_linear=True,
    )
    torch.manual_seed(0)
    spec = _stock_spec(sequence_parallel) if name == STOCK else scheme_spec(name)
    return build_module(spec, config=config, layer_number=1)


def _stock_spec(sequence_parallel: bool):
    """Megatron's local spec; torch's norm in it refuses sequence parallelism, ours does not.

    The norm has no collective of its own: the counts do not depend on its class.
    """
    spec = get_gpt_layer_local_spec()
    if not sequence_parallel:
        return spec
    norms = dict.fromkeys(("input_layernorm", "pre_mlp_layernorm"), MegatronNorm)
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, **norms))


def layer_input(
    dims: Dims, length: int, batch: int, device: str = "cpu", dtype=torch.float32
) -> tuple[Tensor, Tensor]:
    """A residual stream (S, B, D) that wants a gradient, and Megatron's mask: True is hidden."""
    torch.manual_seed(1)
    x = torch.randn(length, batch, dims.d_model, device=device, dtype=dtype, requires_grad=True)
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
    return x, hidden


def forward_of(layer: nn.Module, hidden: Tensor) -> Callable[[Tensor], Tensor]:
    """The layer as a function of the residual stream."""
    return lambda x: layer(x, attention_mask=hidden)[0]
