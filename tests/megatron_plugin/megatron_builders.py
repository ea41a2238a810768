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
from normplugin.megatron_plugin.sites import layer_sites, parameter_names
from normplugin.placement import Dims, NormScheme
from normplugin.reference import ReferenceLayer
from normplugin.testing import randomize_

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
    """Start Megatron's process groups over gloo, once per process: each keeps threads."""
    if not torch.distributed.is_initialized():
        file = file or os.path.join(tempfile.mkdtemp(), "store")
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{file}", rank=rank, world_size=world
        )
    if not parallel_state.model_parallel_is_initialized():
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


def pair(scheme, cfg, layer_number: int = 1):
    """Our layer and the reference with the same random weights; Megatron names -> reference."""
    layer = build_layer(scheme, cfg, layer_number)
    randomize_(layer)
    scheme = layer.scheme
    reference = ReferenceLayer(scheme, DIMS, cfg.activation_func).double()
    names = {}
    for site in layer_sites(layer):
        for name in parameter_names(site, scheme, layer):
            suffix = f".{name.rpartition('.')[2]}" if site.is_norm else ""
            names[name] = f"{site}{suffix}"
    linears = {"self_attention.linear_proj": "attention.out"}
    linears |= {"mlp.linear_fc1": "ffn.fc1", "mlp.linear_fc2": "ffn.fc2"}
    for theirs, ours in linears.items():
        names |= {f"{theirs}.{p}": f"{ours}.{p}" for p in ("weight", "bias")}
    state = {names[n]: p for n, p in layer.named_parameters() if n in names}
    state |= split_qkv(dict(layer.named_parameters()))
    if not cfg.add_bias_linear:
        zeros = {n: torch.zeros_like(p) for n, p in reference.named_parameters()}
        state = {n: state.get(n, zeros[n]) for n in zeros}
    reference.load_state_dict(state, strict=True)
    return layer, reference, names


def split_qkv(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Megatron's interleaved query, key and value rows as the reference's three linears."""
    found = {}
    for name in ("weight", "bias"):
        mixed = parameters.get(f"self_attention.linear_qkv.{name}")
        if mixed is not None:
            rows = mixed.detach().unflatten(0, (DIMS.n_heads, 3, DIMS.head_dim))
            for i, key in enumerate("qkv"):
                found[f"attention.{key}.{name}"] = rows[:, i].flatten(0, 1)
    return found
