"""Ready layer specs for Megatron's ``--spec``, and `apply_scheme` for specs of your own.

    --spec normplugin.megatron_plugin.specs normformer

One constant per scheme serves every config: what depends on it (local or Transformer Engine,
LayerNorm or RMSNorm, MoE, parallelism) is decided when a layer is built. The letters are spelled
with underscores: ``A_C`` for ``A+C``.
"""

from __future__ import annotations

import dataclasses

try:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer
except ImportError as error:
    # Megatron logs an ImportError of a spec module and goes on with no spec at all.
    raise RuntimeError(
        f"megatron-core: it cannot be imported ({error}). "
        "Install it: pip install 'normplugin[megatron]'."
    ) from error

from normplugin.errors import SchemeError
from normplugin.megatron_plugin.layers import SchemeLayer
from normplugin.megatron_plugin.norms import MegatronNorm
from normplugin.placement import NormScheme, resolve_scheme


def scheme_spec(scheme: NormScheme | str) -> ModuleSpec:
    """Return a layer spec of a scheme on top of Megatron's own layer for the config at hand."""
    return ModuleSpec(module=SchemeLayer, params={"scheme": _resolved(scheme)})


def apply_scheme(spec, scheme: NormScheme | str):
    """Return a copy of a layer or block spec with the sites of a scheme.

    Args:
        spec: A ModuleSpec of Megatron's TransformerLayer (GPT, BERT, T5; dense or MoE; MLA), or
            TransformerBlockSubmodules of such layers, whose final norm is then ours too.
        scheme: A scheme or its name.

    Raises:
        SchemeError: For any other spec.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        layers = [apply_scheme(layer, scheme) for layer in spec.layer_specs]
        return dataclasses.replace(spec, layer_specs=layers, layer_norm=MegatronNorm)
    if not isinstance(spec, ModuleSpec) or spec.module is not TransformerLayer:
        name = getattr(getattr(spec, "module", spec), "__name__", type(spec).__name__)
        raise SchemeError(
            f"layer spec: got {name}; legal is a ModuleSpec of TransformerLayer, or block "
            "submodules of them. Apply the scheme before you subclass the layer."
        )
    params = {**spec.params, "scheme": _resolved(scheme)}
    return dataclasses.replace(spec, module=SchemeLayer, params=params)


def _resolved(scheme: NormScheme | str) -> NormScheme:
    return resolve_scheme(scheme) if isinstance(scheme, str) else scheme


preln = scheme_spec("preln")
postln = scheme_spec("postln")
periln = scheme_spec("periln")
normformer = scheme_spec("normformer")
outputln = scheme_spec("outputln")
A = scheme_spec("A")
B = scheme_spec("B")
C = scheme_spec("C")
A_B = scheme_spec("A+B")
A_C = scheme_spec("A+C")
B_C = scheme_spec("B+C")
A_B_C = scheme_spec("A+B+C")
