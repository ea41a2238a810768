"""The Megatron transformer layer of any scheme.

Megatron's ``forward`` is inherited whole. What a scheme adds lives in the submodules the layer is
built from (placing.py): around the residual add (residual.py) and in the linears (linears.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from normplugin.megatron_plugin.checks import check_config, complete_scheme
from normplugin.megatron_plugin.norms import MegatronNorm
from normplugin.megatron_plugin.placing import base_submodules, place
from normplugin.megatron_plugin.resume import check_run, report_fresh
from normplugin.megatron_plugin.sites import added_names, check_promises
from normplugin.placement import NormScheme


class SchemeLayer(TransformerLayer):
    """Megatron's layer with the sites of a scheme.

        x = C(x + drop(B(Attn(A(x)) + b)))
        x = C(lambda * x + drop(B(W_2 N_hidden(act(W_1 A(x) + b_1)) + b_2)))

    Source: arXiv:2110.09456, arXiv:2502.02732. Letters the scheme lacks are the identity.
    Shapes: hidden_states (S, B, D) -> same, S / TP under sequence parallelism.
    Reads:  the config: type, eps and gain of every norm are Megatron's own options.

    Args:
        config: Megatron's config.
        submodules: The layer spec to start from; without one, Megatron's own for this config.
        layer_number: As Megatron's.
        scheme: The placement, or a function that returns it once Megatron's options are known.
        kwargs: As Megatron's.

    Raises:
        SchemeError: For a config that would drop or misplace a norm, and if the built layer
            differs from what the scheme promises.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules=None,
        layer_number: int = 1,
        *args,
        scheme: NormScheme | Callable[[], NormScheme],
        **kwargs,
    ):
        scheme = complete_scheme(scheme if isinstance(scheme, NormScheme) else scheme(), config)
        check_config(config, scheme)
        warm_start = check_run(scheme)
        start = base_submodules(config) if submodules is None else submodules
        super().__init__(config, place(start, scheme, config), layer_number, *args, **kwargs)
        self.scheme = scheme
        first, last = self.layer_number == 1, self.layer_number == config.num_layers
        if last and "C" in scheme.ffn:
            self.mlp_bda.residual_norm = None  # the stack's final norm is the last layer's C
        self.embedding_norm = (
            MegatronNorm(config, config.hidden_size) if first and scheme.embedding_norm else None
        )
        if scheme.embedding_norm or "C" in scheme.ffn:
            config.hetereogenous_dist_checkpoint = True  # layers differ: one key per layer
        check_promises(self)
        if warm_start:
            self.register_load_state_dict_post_hook(partial(report_fresh, added_names(self)))

    def forward(self, hidden_states: Tensor, *args, **kwargs):
        """Megatron's forward, after the embedding norm in the first layer."""
        if self.embedding_norm is not None:
            hidden_states = self.embedding_norm(hidden_states)
        return super().forward(hidden_states, *args, **kwargs)
