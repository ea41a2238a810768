"""Builds Megatron layers on the CPU the way Megatron builds them, for the tests in this folder."""

from __future__ import annotations

import contextlib
import os
import tempfile

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as tp_random
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from normplugin.megatron_plugin import specs
from normplugin.placement import Dims, NormScheme

DIMS = Dims(n_layers=3, d_model=24, d_ffn=40, n_heads=4)


class _NoRandomState:
    """Stands in for the CUDA random states; the tests have no dropout."""

    @contextlib.contextmanager
    def fork(self, *_):
        yield


def on_cpu() -> torch.device:
    """What torch.cuda.current_device answers in these tests: Megatron allocates there."""
    return torch.device("cpu")


def start(rank: int = 0, world: int = 1, file: str | None = None, **sizes: int) -> None:
    """Start Megatron's process groups over gloo, once per process."""
    if not torch.distributed.is_initialized():
        file = file or os.path.join(tempfile.mkdtemp(), "store")
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{file}", rank=rank, world_size=world
        )
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    tp_random._CUDA_RNG_STATE_TRACKER = _NoRandomState()
    tp_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def config(dims: Dims = DIMS, dtype=torch.float64, **changes) -> TransformerConfig:
    """A config without dropout and fusions, biases on."""
    options = {
        "num_layers": dims.n_layers,
        "hidden_size": dims.d_model,
        "ffn_hidden_size": dims.d_ffn,
        "num_attention_heads": dims.n_heads,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "transformer_impl": "local",
        "attention_softmax_in_fp32": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "activation_func": torch.tanh,
        "add_bias_linear": True,
    }
    return TransformerConfig(**{**options, **changes})


def build_layer(scheme: NormScheme, cfg: TransformerConfig, layer_number: int = 1, spec=None):
    """A layer as Megatron's block builds it from a spec."""
    spec = specs.scheme_spec(scheme) if spec is None else spec
    return build_module(spec, config=cfg, layer_number=layer_number)
