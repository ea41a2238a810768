"""What a scheme puts into Megatron's linears: head scale, FFN hidden norm, full-width QK-norm.

Each is a mixin over whatever class the layer spec names, so that its parallelism, precision and
checkpoint keys stay the class's own.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from normplugin.gains import scale_heads
from normplugin.megatron_plugin.norms import ShardedNorm
from normplugin.rebuild import rebuild_input

if TYPE_CHECKING:  # the mixins stand in front of whatever linear class a spec names
    from megatron.core.tensor_parallel.layers import RowParallelLinear as _Linear
else:
    _Linear = object


class _Sharded(_Linear):
    """Adds this class's parameters to the linear's sharded state, on axis 0 over TP."""

    added: tuple[str, ...]

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """The linear's own sharded state, with the added parameters sharded and not replicated."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {
            name: value
            for name, value in self.state_dict(prefix="", keep_vars=True).items()
            if name.partition(".")[0] in self.added
        }
        sharded = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=metadata["dp_cp_group"] if metadata else None,
        )
        return {**state, **sharded}


class HeadScaleMixin(_Sharded):
    """linear_proj with a learned scale per query head in front of it.

        y = concat(g_1 h_1, ..., g_n h_n) W_O

    The scaled heads are not kept for the backward pass; h is.

    Source: Shleifer et al. 2021, arXiv:2110.09456.
    State:  head_scale (n_heads / TP,), sharded over TP with the heads.
    """

    added = ("head_scale",)

    def __init__(self, *args, config, tp_group=None, **kwargs):
        super().__init__(*args, config=config, tp_group=tp_group, **kwargs)
        self.group = _group(self, tp_group)
        heads = config.num_attention_heads // self.group.size()
        self.head_scale = nn.Parameter(torch.ones(heads, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.head_scale, True, 0, 1)

    def forward(self, x: Tensor):
        """Scale the heads, project."""
        rebuild = functools.partial(scale_heads, x.detach(), self.head_scale)
        return rebuild_input(super().forward, scale_heads(x, self.head_scale), rebuild)


class HiddenNormMixin(_Sharded):
    """linear_fc2 with a norm over the full FFN width in front of it.

        y = W_2 N(act(W_1 x + b_1))

    The normed activation is not kept for the backward pass; what it is made of is.

    Source: Shleifer et al. 2021, arXiv:2110.09456.
    State:  hidden_norm.weight, hidden_norm.bias (d_ffn / TP,), sharded over TP.
    """

    added = ("hidden_norm",)

    def __init__(self, input_size, *args, config, tp_group=None, **kwargs):
        super().__init__(input_size, *args, config=config, tp_group=tp_group, **kwargs)
        self.group = _group(self, tp_group)
        self.hidden_norm = ShardedNorm(config, input_size, self.group)

    def forward(self, x: Tensor):
        """Normalise over all ranks, project."""
        return rebuild_input(super().forward, *self.hidden_norm.rebuildable(x))


class FullQKNormMixin(_Sharded):
    """linear_qkv with a norm over the full width of the queries and of the keys behind it.

        q, k = N(x W_Q + b_Q), N(x W_K + b_K)

    Source: OLMo 2. Named so that Megatron's name-based reduction of q_layernorm and k_layernorm,
    which sums replicated gains over TP, does not meet these sharded ones.
    Shapes: output (S, B, groups / TP * (queries per group + 2) * head_dim), Megatron's layout.
    State:  query_norm, key_norm (n / TP,), sharded over TP.
    """

    added = ("query_norm", "key_norm")

    def __init__(self, *args, config, tp_group=None, **kwargs):
        super().__init__(*args, config=config, tp_group=tp_group, **kwargs)
        self.group = _group(self, tp_group)
        self.n_groups = config.num_query_groups // self.group.size()
        self.head_dim = config.kv_channels
        self.query_norm = ShardedNorm(
            config, config.num_attention_heads * self.head_dim, self.group
        )
        self.key_norm = ShardedNorm(config, config.num_query_groups * self.head_dim, self.group)

    def forward(self, *args, **kwargs):
        """Project, normalise queries and keys over all ranks."""
        mixed, bias = super().forward(*args, **kwargs)
        groups = mixed.unflatten(-1, (self.n_groups, -1, self.head_dim))
        q, k, v = groups[..., :-2, :], groups[..., -2:-1, :], groups[..., -1:, :]
        q = self.query_norm(q.flatten(-3)).view(q.shape)
        k = self.key_norm(k.flatten(-3)).view(k.shape)
        return torch.cat([q, k, v], dim=-2).flatten(-3), bias


@functools.cache
def mixed(mixin: type, linear: type) -> type:
    """Return a subclass of ``linear`` with ``mixin`` in front; the same class for the same pair."""
    name = f"{mixin.__name__.removesuffix('Mixin')}{linear.__name__}"
    return type(name, (mixin, linear), {"__module__": __name__})


def _group(linear, tp_group):
    """The linear's TP group: what it resolved itself, or what it was given."""
    return getattr(linear, "tp_group", None) or tp_group
