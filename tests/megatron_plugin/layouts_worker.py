"""One rank that trains a tiny GPT in several parallel layouts with Megatron's own parts.

Megatron's GPTModel, DistributedDataParallel, optimizer, pipeline schedules, gradient finalisation
and distributed checkpoints; only the CUDA underneath is emulated. Arguments: FOLDER CASE... where a
case is SCHEME:LAYOUT. Every case loads ``FOLDER/SCHEME/<layout before it>/start``, saves what it
loaded, trains, and saves again; the layout ``one`` makes the first checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

from normplugin.megatron_plugin import cpu_emulation

cpu_emulation.enable()

import torch  # noqa: E402 -- after the emulation
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import random as tp_random  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from normplugin.megatron_plugin.specs import scheme_spec  # noqa: E402
from normplugin.placement import resolve_scheme  # noqa: E402
from normplugin.testing import randomize_  # noqa: E402

LAYERS, WIDTH, HEADS, FFN, VOCAB, LENGTH = 4, 32, 4, 48, 64, 12
MICRO, BATCHES, STEPS, EARLIER = 2, 4, 10, 3
# Scheme name, its options, and what the config has beside them.
MODELS: dict[str, tuple[str, dict, dict]] = {
    "normformer": ("normformer", {"residual_scale": True}, {}),
    "periln": (
        "periln",
        {"embedding_norm": True},
        {"normalization": "RMSNorm", "add_bias_linear": False},
    ),
    "postln": ("postln", {}, {}),
    "outputln": ("outputln", {}, {"num_query_groups": 2}),
    "moe": (
        "periln",
        {},
        {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
            "add_bias_linear": False,
        },
    ),
}
_TP2 = {"tensor_model_parallel_size": 2}
_PP2 = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
_SP2 = {**_TP2, "sequence_parallel": True}
_FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def _selective(*modules: str) -> dict:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


LAYOUTS: dict[str, dict] = {
    "one": {},
    "tp2": _TP2,
    "sp2": _SP2,
    "pp2": _PP2,
    # As Megatron's arguments have it: of two ranks each is the next and the previous of the other.
    "vpp2": {
        **_PP2,
        "virtual_pipeline_model_parallel_size": 2,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    },
    "dp2": {},
    "ep2": {"expert_model_parallel_size": 2},
    "one-full": _FULL,
    "one-layernorm": _selective("layernorm", "core_attn"),
    # Without biases only: with them 0.19's recompute of the FFN never ends, for preln too.
    # It seems that the checkpointed function returns the bias parameter, which becomes its output.
    "one-mlp": _selective("mlp"),
    "sp2-full": {**_SP2, **_FULL},
    "sp2-mlp": {**_SP2, **_selective("mlp", "core_attn")},
}

# Stand-ins for Transformer Engine, which upstream's recompute of norms asks whether FP8 is on.
tp_random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
tp_random.fp8_autocast = tp_random.activation_recompute_forward = lambda **options: (
    contextlib.nullcontext()
)


class Run:
    """A model in one layout, its optimizer and its data."""

    def __init__(self, model: str, layout: str):
        model, _, suffix = model.partition("+")
        self.distributed_optimizer = suffix == "distributed"
        # Megatron has one optimizer at EP = 1 and two at EP = 2, and cannot load one as the other;
        # its distributed one, over torch's Adam (no TE, no apex), asserts or fails when it loads.
        self.saves_optimizer = model != "moe" and not self.distributed_optimizer
        self.config = _config(model, layout)
        _start_groups(self.config)
        scheme_name, options, _ = MODELS[model]
        scheme = resolve_scheme(scheme_name, **options)
        stages = self.config.virtual_pipeline_model_parallel_size
        self.chunks = [
            self._chunk(scheme, stage) for stage in (range(stages) if stages else (None,))
        ]

    def _chunk(self, scheme, vp_stage: int | None):
        at = {"ignore_virtual": False, "vp_stage": vp_stage}
        chunk = GPTModel(
            config=self.config,
            transformer_layer_spec=scheme_spec(scheme),
            vocab_size=VOCAB,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(**at),
            post_process=parallel_state.is_pipeline_last_stage(**at),
            share_embeddings_and_output_weights=True,
            vp_stage=vp_stage,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        return chunk

    def prepare(self) -> None:
        """Wrap the chunks and build the optimizer, as Megatron's trainer does."""
        ddp = DistributedDataParallelConfig(
            overlap_grad_reduce=self.distributed_optimizer,
            overlap_param_gather=self.distributed_optimizer,
            use_distributed_optimizer=self.distributed_optimizer,
            bucket_size=2000 if self.distributed_optimizer else None,
        )
        self.model = [
            DistributedDataParallel(self.config, ddp, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(self.chunks)
        ]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                min_lr=1e-4,
                weight_decay=0.1,
                clip_grad=1.0,
                adam_eps=1e-6,
                use_distributed_optimizer=self.distributed_optimizer,
                overlap_param_gather=self.distributed_optimizer,
            ),
            self.model,
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=1e-3, min_lr=1e-4, lr_warmup_steps=0,
            lr_decay_steps=100, lr_decay_style="cosine", start_wd=0.1, end_wd=0.1,
            wd_incr_steps=100, wd_incr_style="constant",
        )  # fmt: skip
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        if self.distributed_optimizer:
            first, *more = (chunk.no_sync for chunk in self.model)
            self.config.no_sync_func = [first, *more] if more else first

    def train_step(self, step: int, look=None) -> tuple[float | None, float]:
        """One optimizer step; return the loss on the last stage, and the gradient norm."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        data = [_batches(step) for _ in self.model]
        reduced = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=data if len(data) > 1 else data[0],
            model=self.model if len(data) > 1 else self.model[0],
            num_microbatches=BATCHES // parallel_state.get_data_parallel_world_size(),
            seq_length=LENGTH,
            micro_batch_size=MICRO,
            decoder_seq_length=LENGTH,
            forward_only=False,
        )
        if look:
            look()
        done, norm, _ = self.optimizer.step()
        assert done
        self.scheduler.step(1)
        return (float(torch.stack(reduced).mean()) if reduced else None), float(norm)

    def save(self, folder: Path) -> None:
        """Save a distributed checkpoint, after what is left of an overlapped gather."""
        if self.distributed_optimizer:
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)
        if torch.distributed.get_rank() == 0:
            folder.mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(self._state(loading=False), str(folder))

    def load(self, folder: Path) -> None:
        """Load a distributed checkpoint of any layout."""
        state = dist_checkpointing.load(self._state(loading=True), str(folder))
        names = _model_names(self.chunks)
        for name, chunk in zip(names, self.chunks, strict=True):
            chunk.load_state_dict(state[name])
        if self.saves_optimizer:
            self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def _state(self, loading: bool) -> dict[str, Any]:
        metadata = {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        state = {
            name: chunk.sharded_state_dict(metadata=metadata)
            for name, chunk in zip(_model_names(self.chunks), self.chunks, strict=True)
        }
        if self.saves_optimizer:
            state["optimizer"] = self.optimizer.sharded_state_dict(
                dict(state), is_loading=loading, metadata=metadata
            )
        return {**state, "scheduler": self.scheduler.state_dict()}

    def parameters(self):
        """(name in the whole model, parameter) of this rank's part."""
        for chunk in self.chunks:
            offsets = {
                str(index): str(layer.layer_number - 1)
                for index, layer in enumerate(chunk.decoder.layers)
            }
            for name, parameter in chunk.named_parameters():
                yield _whole_name(name, offsets, self.config), parameter


def _config(model: str, layout: str) -> TransformerConfig:
    options = {
        "num_layers": LAYERS, "hidden_size": WIDTH, "ffn_hidden_size": FFN,
        "num_attention_heads": HEADS, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "use_cpu_initialization": True, "params_dtype": torch.float32,
        "transformer_impl": "local", "masked_softmax_fusion": False,
        "bias_dropout_fusion": False, "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False, "persist_layer_norm": False,
        **MODELS[model][2], **LAYOUTS[layout],
    }  # fmt: skip
    return TransformerConfig(**options)


def _start_groups(config: TransformerConfig) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        create_gloo_process_groups=True,
    )
    tp_random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    unset_num_microbatches_calculator()
    ranks = parallel_state.get_data_parallel_world_size()
    init_num_microbatches_calculator(0, None, MICRO * BATCHES, MICRO, ranks)


def _model_names(chunks: list) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def _batches(step: int):
    """This data-parallel rank's micro-batches of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (BATCHES, MICRO, LENGTH + 1), generator=generator)
    ranks = parallel_state.get_data_parallel_world_size()
    yield from tokens[parallel_state.get_data_parallel_rank() :: ranks]


def _forward_step(data, model):
    tokens = next(data)
    positions = torch.arange(LENGTH).expand(MICRO, -1)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    losses = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())

    def loss(output):
        mean = output.float().mean()
        return mean, mean.detach().clone()  # Megatron divides the first in place

    return losses, loss


def _whole_name(name: str, offsets: dict[str, str], config: TransformerConfig) -> str:
    """Layers and experts by their number in the whole model; a tied copy by its original."""
    name = re.sub(r"(?<=decoder\.layers\.)\d+", lambda m: offsets[m.group()], name)
    if config.num_moe_experts:
        first = parallel_state.get_expert_model_parallel_rank() * (
            config.num_moe_experts // config.expert_model_parallel_size
        )
        name = re.sub(r"(?<=local_experts\.)\d+", lambda m: str(first + int(m.group())), name)
    return "embedding.word_embeddings.weight" if name == "output_layer.weight" else name


def _gathered(run: Run) -> dict[str, list[torch.Tensor]]:
    """Name -> every copy of the whole gradient, as Megatron's optimizer finds it.

    Slices are put together by Megatron's own attributes, ranks in their order.
    """
    size = run.config.tensor_model_parallel_size
    mine = [
        (name, parameter.main_grad.clone(), _axis(parameter) if size > 1 else None)
        for name, parameter in run.parameters()
    ]
    ranks: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, mine)
    found: dict[str, list[torch.Tensor]] = {}
    axes = {}
    for name, gradient, axis in itertools.chain(*ranks):
        found.setdefault(name, []).append(gradient)
        axes[name] = axis
    return {
        name: copies if axes[name] is None else [torch.cat(copies, axes[name])]
        for name, copies in found.items()
    }


def _axis(parameter) -> int | None:
    sharded = getattr(parameter, "tensor_model_parallel", False)
    return parameter.partition_dim if sharded else None


def _decayed(run: Run) -> dict[str, float]:
    """Name -> the weight decay of the optimizer's group that holds the parameter."""
    groups = {
        id(parameter): group["weight_decay"]
        for group in run.optimizer.param_groups
        for parameter in group["params"]
    }
    return {name: groups[id(parameter)] for name, parameter in run.parameters()}


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every whole tensor of a checkpoint."""
    return dist_checkpointing.load_plain_tensors(str(folder))


def train_case(root: Path, model: str, layout: str, before: str | None) -> dict[str, Any]:
    """Load, save what was loaded, train; return what the test compares."""
    run, found = Run(model, layout), {}
    folder = root / model / layout
    if before is None:
        (chunk,) = run.chunks
        randomize_(chunk)
    run.prepare()
    if before is None:
        for step in range(EARLIER if run.saves_optimizer else 0):
            run.train_step(step)
    else:
        run.load(root / model / before / "start")
    if "-" not in layout:  # recomputing changes nothing that is saved
        run.save(folder / "start")
        found["start"] = _tensors(folder / "start")
    if not run.distributed_optimizer:
        found["decayed"] = _decayed(run)

    def look():
        found["gradients"] = {} if run.distributed_optimizer else _gathered(run)

    steps = [
        run.train_step(EARLIER + step, None if step else look)
        for step in range(3 if "-" in layout else STEPS)
    ]
    run.save(folder / "end")
    found["end"] = _tensors(folder / "end")
    ranks: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, [loss for loss, _ in steps])
    found["losses"] = torch.tensor([rank for rank in ranks if rank[0] is not None]).mean(0)
    found["norms"] = torch.tensor([norm for _, norm in steps])
    return found


def main() -> None:
    root, results, before = Path(sys.argv[1]), {}, {}
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", timeout=timedelta(minutes=3))
    for case in sys.argv[2:]:
        model, layout = case.split(":")
        start = None if layout == "one" else before.get(model, "one")
        print(f"{case} from {start}", file=sys.stderr, flush=True)
        results[case] = train_case(root, model, layout, start)
        if "-" not in layout:
            before[model] = layout
        if rank == 0:
            torch.save(results, root / f"world{os.environ['WORLD_SIZE']}.pt")


if __name__ == "__main__":
    main()
