"""A GPT for Megatron's trainer: model, data, loss. Imported after the CPU emulation has begun.

Written against ``megatron.training`` of megatron-core 0.17 to 0.19.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor

from normplugin.errors import SchemeError
from normplugin.megatron_plugin.arguments import add_norm_arguments
from normplugin.megatron_plugin.layers import SchemeLayer
from normplugin.megatron_plugin.norms import MegatronNorm
from normplugin.megatron_plugin.placing import base_submodules
from normplugin.megatron_plugin.resume import check_resume

_UNSUPPORTED = (
    "mtp_num_layers",
    "sft",
    "fim_data",
    "logits_load_dir",
    "yaml_cfg",
    "dataloader_inter_document_masking",
    "hybrid_context_parallel",
)


def pretrain_gpt() -> None:
    """Parse Megatron's command line and train."""
    build_datasets.is_distributed = True  # type: ignore[attr-defined]
    common: dict[str, Any] = {
        "train_valid_test_dataset_provider": build_datasets,
        "model_provider": build_model,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    if "cfg_container" not in inspect.signature(pretrain).parameters:  # megatron-core 0.17
        pretrain(**common, extra_args_provider=add_norm_arguments)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(extra_args_provider=add_norm_arguments)
    pretrain(pretrain_cfg_container_from_args(args), **common)


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Return this rank's part of the model, as Megatron's options describe it."""
    args = get_args()
    for name in _UNSUPPORTED:
        if getattr(args, name, None):
            raise SchemeError(
                f"--{name.replace('_', '-')}: got it here; this small entry point has no such "
                "thing. Run NVIDIA's pretrain_gpt.py under normplugin.megatron_plugin.launch."
            )
    config = config or core_transformer_config_from_args(args)
    if args.spec is None:
        check_resume(args, None)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(args.spec, config, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def layer_spec(spec: Any, config: Any, vp_stage: int | None = None) -> Any:
    """Return the spec of the layers, and with ours that of the final norm too.

    A bare layer spec leaves the final norm to the block, whose own needs TE or apex under sequence
    parallelism.
    """
    if spec is None:
        return ModuleSpec(module=TransformerLayer, submodules=base_submodules(config))
    layer = import_module(spec)
    ours = isinstance(layer, ModuleSpec) and isinstance(layer.module, type)
    if not ours or not issubclass(layer.module, SchemeLayer):
        return layer
    layers = [layer] * get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=MegatronNorm)


def build_datasets(sizes: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Return the training, validation and test data that Megatron's data options name."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    settings = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": get_tokenizer(),
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
    }
    # What Megatron's options and its dataset config call by one name, or nearly.
    for field in dataclasses.fields(GPTDatasetConfig):
        for name in (field.name, f"dataloader_{field.name}"):
            if field.init and field.name not in settings and hasattr(args, name):
                settings[field.name] = getattr(args, name)
    kind = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0(f"> building {kind.__name__}s ...")
    config = GPTDatasetConfig(**settings)
    return BlendedMegatronDatasetBuilder(kind, sizes, _reads_data(vp_stage), config).build()


def _reads_data(vp_stage: int | None) -> Any:
    """Every TP rank of the first and last stage reads its own batches: nothing is broadcast."""
    return lambda: _is_first_stage(vp_stage) or _is_last_stage(vp_stage)


def _is_first_stage(vp_stage: int | None) -> bool:
    return parallel_state.is_pipeline_first_stage(
        ignore_virtual=vp_stage is None, vp_stage=vp_stage
    )


def _is_last_stage(vp_stage: int | None) -> bool:
    return parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    """Run the model on the next batch; return its output and the loss as a function of it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = _next_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),
    )
    return output, functools.partial(masked_loss, batch.get("loss_mask"))


def _next_batch(data_iterator: Any, vp_stage: int | None) -> dict[str, Tensor]:
    """The batch on the GPU, this context-parallel rank's part of it; empty on middle stages."""
    if not _reads_data(vp_stage)():
        return {}
    batch = next(data_iterator)
    batch = {
        name: value.cuda(non_blocking=True)
        for name, value in batch.items()
        if isinstance(value, Tensor)
    }
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return batch
    rank = parallel_state.get_context_parallel_rank()
    axes = {"attention_mask": 2}
    return {
        name: _context_part(value, axes.get(name, 1), rank, size) for name, value in batch.items()
    }


def _context_part(value: Tensor, axis: int, rank: int, size: int) -> Tensor:
    """Chunks rank and 2 size - 1 - rank of 2 size, as Megatron's causal attention splits them."""
    if value.dim() <= axis:
        return value
    chunks = value.chunk(2 * size, dim=axis)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=axis)


def masked_loss(
    loss_mask: Tensor | None, losses: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the summed loss of this micro-batch, its number of tokens, and both to report."""
    assert loss_mask is not None, "only the last pipeline stage has a loss"
    mask = loss_mask.reshape(-1).float()
    loss = (losses.reshape(-1).float() * mask).sum()
    tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for reject, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss, rejection_func=reject, message=f"{what} in the loss", fatal=True
            )
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}
