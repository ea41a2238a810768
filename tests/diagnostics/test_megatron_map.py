"""What the probe sees in Megatron's block is what the block's formula says, ours and Megatron's."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron_builders import config, on_cpu, start

from normplugin.diagnostics import quantities
from normplugin.diagnostics.megatron_map import map_model
from normplugin.diagnostics.options import DiagnosticsError
from normplugin.diagnostics.probe import Probe
from normplugin.diagnostics.session import summarize
from normplugin.megatron_plugin import specs
from normplugin.megatron_plugin.norms import MegatronNorm
from normplugin.megatron_plugin.placing import base_submodules
from normplugin.placement import resolve_scheme
from normplugin.testing import randomize_

SCHEMES = {
    "Megatron's own": None,
    "preln": resolve_scheme("preln"),
    "normformer": resolve_scheme("normformer", residual_scale=True, embedding_norm=True),
    "A+C": resolve_scheme("A+C"),
    "B+C": resolve_scheme("B+C"),
}
EXACT = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", on_cpu)
    start()


class _Model(MegatronModule):
    """What stands around a block."""

    def __init__(self, scheme):
        cfg = config()
        super().__init__(cfg)
        spec = (
            ModuleSpec(module=TransformerLayer, submodules=base_submodules(cfg))
            if scheme is None
            else specs.scheme_spec(scheme)
        )
        layers = [spec] * cfg.num_layers
        self.decoder = TransformerBlock(
            cfg, TransformerBlockSubmodules(layer_specs=layers, layer_norm=MegatronNorm)
        )
        randomize_(self.double())


def plain_formula(layer, final, x):
    """Yield part, raw output, stream behind it; the block's lines, with its own modules."""
    if getattr(layer, "embedding_norm", None) is not None:
        x = layer.embedding_norm(x)
    yield "", None, x
    mask = torch.triu(torch.ones(1, 1, len(x), len(x), dtype=torch.bool), 1)
    for part in ("attention", "ffn"):
        if part == "attention":
            out, bias = layer.self_attention(layer.input_layernorm(x), attention_mask=mask)
            end = layer.self_attn_bda
        else:
            out, bias = layer.mlp(layer.pre_mlp_layernorm(x))
            end = layer.mlp_bda
        raw = added = out + bias
        if getattr(end, "output_norm", None) is not None:
            added = end.output_norm(raw)
        scale = getattr(end, "residual_scale", None)
        x = (x if scale is None else scale * x) + added
        norm = getattr(end, "residual_norm", None)
        if part == "ffn" and norm is None and "C" in getattr(layer, "scheme", SCHEMES["preln"]).ffn:
            norm = final
        x = x if norm is None else norm(x)
        yield part, raw, x


@pytest.mark.parametrize("name", SCHEMES)
def test_numbers_are_the_plain_formulas(name, monkeypatch):
    """Streams, raw outputs (with their biases) and contributions, which add up."""
    model = _Model(SCHEMES[name])
    seen: list[torch.Tensor] = []
    spied = quantities.contribution
    monkeypatch.setattr(quantities, "contribution", lambda *xs: seen.append(spied(*xs)) or seen[-1])
    x = torch.randn(5, 2, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mask = torch.triu(torch.ones(1, 1, 5, 5, dtype=torch.bool), 1)
    probe = Probe(map_model([model]))
    probe.attach()
    model.decoder(x, attention_mask=mask)
    probe.detach()
    probe.add_gains()
    found = {r.place[1:]: r.value for r in summarize(probe.read(), 1)}
    contributions = iter(seen)
    for number, layer in enumerate(model.decoder.layers, 1):
        entry = x
        for part, raw, behind in plain_formula(layer, model.decoder.final_layernorm, x):
            if part:
                torch.testing.assert_close(next(contributions), behind - x, **EXACT)
                variance = raw.var(-1, correction=0).mean().item()
                key = ("decoder", number, part)
                assert found[(*key, "raw_variance")] == pytest.approx(variance, 1e-9)
                assert found[(*key, "raw_max_abs")] == pytest.approx(raw.abs().max().item(), 1e-9)
            else:
                entry = behind
            x = behind
        stream = x.var(-1, correction=0).mean().item()
        assert found[("decoder", number, "stream", "variance")] == pytest.approx(stream, 1e-9)
        angle = (torch.cosine_similarity(entry, x, dim=-1).acos() / torch.pi).mean().item()
        key = ("decoder", number, "stream", "angular_distance")
        assert found[key] == pytest.approx(angle, 1e-8)
        if number == 1:
            start_variance = entry.var(-1, correction=0).mean().item()
            key = ("decoder", 0, "stream", "variance")
            assert found[key] == pytest.approx(start_variance, 1e-9)
    assert next(contributions, None) is None
    if name != "B+C":
        weight = model.decoder.layers[1].input_layernorm.weight
        key = ("decoder", 2, "attention.input", "gain_mean")
        assert found[key] == pytest.approx(weight.mean().item(), 1e-9)


def test_models_without_a_block_are_refused():
    """One sentence."""
    with pytest.raises(DiagnosticsError, match="--diagnostics-interval: got a Linear; it has no"):
        map_model([torch.nn.Linear(2, 2)])
