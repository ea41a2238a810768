"""Specs: names, what they accept, MoE, MLA, BERT, T5, Transformer Engine's classes, refusals."""

from __future__ import annotations

import argparse
import sys
import types

import pytest
import torch
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.T5 import t5_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron_builders import DIMS, build_layer, config, on_cpu, start

from normplugin.errors import SchemeError
from normplugin.megatron_plugin import linears, placing, resume, specs
from normplugin.megatron_plugin.layers import SchemeLayer
from normplugin.megatron_plugin.norms import MegatronNorm
from normplugin.megatron_plugin.residual import BiasDropoutAdd
from normplugin.placement import SCHEMES, resolve_scheme
from normplugin.testing import randomize_

S, B = 6, 2


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", on_cpu)
    start()


def run(layer, dtype=torch.float64, **inputs):
    """Output and gradients of a layer on random input."""
    x = torch.randn(S, B, DIMS.d_model, dtype=dtype, requires_grad=True)
    hidden = torch.triu(torch.ones(1, 1, S, S, dtype=torch.bool), 1)
    out, _ = layer(x, attention_mask=hidden, **inputs)
    (out * torch.randn_like(out)).sum().backward()
    return out


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_has_a_constant(name):
    """Megatron's own --spec import finds a ready ModuleSpec under an identifier."""
    spec = import_module(("normplugin.megatron_plugin.specs", name.replace("+", "_")))
    assert isinstance(spec, ModuleSpec) and issubclass(spec.module, SchemeLayer)
    assert spec.params["scheme"] == resolve_scheme(name)


@pytest.mark.parametrize("name", SCHEMES)
def test_apply_scheme_equals_the_constant(name):
    """A scheme on Megatron's own layer spec gives the constant's layer, and leaves the spec be."""
    stock = gpt_layer_specs.get_gpt_layer_local_spec()
    before = repr(stock)
    mine = build_layer(None, config(), spec=specs.apply_scheme(stock, name))
    constant = build_layer(resolve_scheme(name), config())
    assert repr(stock) == before
    shapes = [{n: p.shape for n, p in layer.named_parameters()} for layer in (mine, constant)]
    assert shapes[0] == shapes[1]


def test_preln_has_the_stock_layers_names_and_function():
    """preln has the parameters of Megatron's own local layer, and computes the same."""
    cfg = config(dtype=torch.float32)  # the stock norm knows no other
    stock = build_layer(None, cfg, spec=gpt_layer_specs.get_gpt_layer_local_spec())
    mine = build_layer(resolve_scheme("preln"), cfg)
    randomize_(stock)
    mine.load_state_dict(stock.state_dict(), strict=True)
    x = torch.randn(S, B, DIMS.d_model)
    hidden = torch.triu(torch.ones(1, 1, S, S, dtype=torch.bool), 1)
    assert torch.equal(mine(x, attention_mask=hidden)[0], stock(x, attention_mask=hidden)[0])


def test_block_specs_get_our_final_norm():
    """Block submodules keep their layers' kinds, and the final norm is ours."""
    cfg = config(num_moe_experts=2, moe_layer_freq=[0, 1, 1], moe_ffn_hidden_size=16)
    block = gpt_layer_specs.get_gpt_decoder_block_spec(cfg, use_transformer_engine=False)
    placed = specs.apply_scheme(block, "periln")
    assert isinstance(placed, TransformerBlockSubmodules) and placed.layer_norm is MegatronNorm
    layers = [build_layer(None, cfg, i + 1, spec) for i, spec in enumerate(placed.layer_specs)]
    assert [layer.is_moe_layer for layer in layers] == [False, True, True]
    assert all(isinstance(layer.mlp_bda, BiasDropoutAdd) for layer in layers)


@pytest.mark.parametrize("name", ["periln", "outputln", "postln", "A+C"])
def test_moe_keeps_its_router_alive(name):
    """The output norm follows the whole MoE layer: the router's gradient is not cancelled."""
    cfg = config(
        dtype=torch.float32, num_moe_experts=4, moe_ffn_hidden_size=16, moe_router_topk=2,
        add_bias_linear=False, moe_token_dispatcher_type="allgather",
        moe_shared_expert_intermediate_size=16, moe_aux_loss_coeff=0.0,
    )  # fmt: skip
    layer = build_layer(resolve_scheme(name), cfg)
    randomize_(layer)
    try:
        run(layer, torch.float32)
    except NameError as error:
        if error.name != "te_general_gemm":
            raise
        pytest.skip("the router of megatron-core 0.16 needs Transformer Engine")
    assert layer.mlp.router.weight.grad.abs().max() > 1e-4
    assert all(p.grad is not None for p in layer.mlp_bda.parameters())


@pytest.mark.parametrize("name", ["periln", "normformer"])
def test_mla(name):
    """Multi-latent attention takes the schemes without QK-norm.

    Megatron builds it with Transformer Engine's attention only: the submodules are looked at.
    """
    stock = gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True).submodules
    placed = placing.place(stock, resolve_scheme(name), config())
    assert placed.self_attn_bda.module is BiasDropoutAdd
    assert placed.input_layernorm is MegatronNorm
    proj = placed.self_attention.submodules.linear_proj
    assert issubclass(proj, linears.HeadScaleMixin) == (name == "normformer")
    cfg = config()
    cfg.multi_latent_attention = True
    with pytest.raises(SchemeError, match=r"--multi-latent-attention: got it with .*'outputln'"):
        build_layer(resolve_scheme("outputln"), cfg)


def test_bert_and_t5():
    """The schemes go onto BERT's layer and onto T5's encoder and decoder layers."""
    for name in ("periln", "normformer", "postln"):
        run(build_layer(None, config(), spec=specs.apply_scheme(bert_layer_local_spec, name)))
        for stock in (
            t5_spec.encoder_model_with_local_spec(),
            t5_spec.decoder_model_with_local_spec(),
        ):
            layer = build_layer(None, config(), spec=specs.apply_scheme(stock, name))
            if not isinstance(layer.cross_attention, IdentityOp):
                memory = torch.randn(5, B, DIMS.d_model, dtype=torch.float64)
                seen = torch.zeros(1, 1, S, 5, dtype=torch.bool)
                run(layer, context=memory, context_mask=seen)
                assert all(p.grad is not None for n, p in layer.named_parameters() if "cross" in n)


def test_fused_input_norms_of_transformer_engine(monkeypatch):
    """Where TE's linear brings the input norm, it stays there, and goes where a scheme has none."""
    module = placing.sys.modules[__name__]

    class TEColumnParallelLinear:
        pass

    class TELayerNormColumnParallelLinear:
        pass

    monkeypatch.setattr(module, "TEColumnParallelLinear", TEColumnParallelLinear, raising=False)
    stock = gpt_layer_specs.get_gpt_layer_local_spec().submodules
    replace = placing.dataclasses.replace
    attention = replace(
        stock.self_attention,
        submodules=replace(
            stock.self_attention.submodules, linear_qkv=TELayerNormColumnParallelLinear
        ),
    )
    mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=TELayerNormColumnParallelLinear, linear_fc2=object),
    )
    fused = replace(
        stock,
        input_layernorm=IdentityOp,
        pre_mlp_layernorm=IdentityOp,
        self_attention=attention,
        mlp=mlp,
    )
    kept = placing.place(fused, resolve_scheme("periln"), config())
    assert kept.input_layernorm is IdentityOp and kept.pre_mlp_layernorm is IdentityOp
    assert kept.self_attention.submodules.linear_qkv is TELayerNormColumnParallelLinear
    for name in ("postln", "B"):
        placed = placing.place(fused, resolve_scheme(name), config())
        assert placed.self_attention.submodules.linear_qkv is TEColumnParallelLinear
        assert placed.mlp.submodules.linear_fc1 is TEColumnParallelLinear
        assert placed.input_layernorm is IdentityOp


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("normformer", {"num_moe_experts": 2, "moe_ffn_hidden_size": 8}, "--num-experts: .*router"),
        ("periln", {"mtp_num_layers": 1}, "--mtp-num-layers"),
        ("periln", {"transformer_impl": "inference_optimized"}, "inference_optimized"),
        ("outputln", {"qk_layernorm": True}, "whose QK-norm spans the full width"),
        ("periln", {"num_moe_experts": 2, "moe_layer_freq": 2}, "--moe-layer-freq: got 2"),
    ],
)
def test_refused_configs(name, changes, message):
    """A config that would drop or misplace a norm is refused by the option's name."""
    cfg = config()
    for option, value in changes.items():
        setattr(cfg, option, value)
    with pytest.raises(SchemeError, match=message):
        build_layer(resolve_scheme(name), cfg)


def test_a_dropped_norm_stops_the_build(monkeypatch):
    """If a site is silently not built, the layer names its parameters."""
    monkeypatch.setattr(placing, "_bias_dropout_add", lambda scheme, config, sublayer, slot: slot)
    with pytest.raises(SchemeError, match=r"missing \['mlp_bda.output_norm.bias'"):
        build_layer(resolve_scheme("periln"), config())


def test_other_specs_are_refused():
    """What is no layer spec ends with a sentence."""
    with pytest.raises(SchemeError, match="layer spec: got get_gpt_layer_local_spec"):
        specs.apply_scheme(gpt_layer_specs.get_gpt_layer_local_spec, "periln")
    with pytest.raises(SchemeError, match="Apply the scheme before you subclass"):
        specs.apply_scheme(specs.periln, "periln")


@pytest.mark.parametrize("name", ["normformer", "periln", "A+C"])
def test_added_parameters_are_vectors_with_the_right_marks(name):
    """All added parameters are 1-D (Megatron spares vectors from weight decay) and marked."""
    cfg = config()
    layer = build_layer(resolve_scheme(name, residual_scale=True), cfg)
    stock = dict(build_layer(resolve_scheme("preln"), config()).named_parameters())
    for path, parameter in layer.named_parameters():
        if path not in stock:
            assert parameter.dim() == 1, path
            assert "q_layernorm" not in path and "k_layernorm" not in path
            assert hasattr(parameter, "sequence_parallel") != getattr(
                parameter, "tensor_model_parallel", False
            ), path


@pytest.mark.parametrize("name", ["normformer", "periln", "outputln"])
def test_added_operations_are_per_token(name):
    """Context parallelism splits the sequence: what is added acts on every token alone."""
    layer = build_layer(resolve_scheme(name, residual_scale=True), config())
    randomize_(layer)
    x = torch.randn(S, B, DIMS.d_model, dtype=torch.float64)
    residual = torch.randn_like(x)
    for bda in (layer.self_attn_bda, layer.mlp_bda):
        whole = bda(True, False)((x, None), residual, 0.0)
        halves = [bda(True, False)((x[h], None), residual[h], 0.0) for h in (slice(3), slice(3, 6))]
        torch.testing.assert_close(torch.cat(halves), whole, rtol=0, atol=0)
    hidden = torch.randn(S, B, DIMS.d_ffn, dtype=torch.float64)
    whole = layer.mlp.linear_fc2(hidden)[0]
    halves = torch.cat([layer.mlp.linear_fc2(h)[0] for h in hidden.chunk(2)])
    torch.testing.assert_close(halves, whole, rtol=1e-12, atol=1e-12)


def test_another_scheme_is_not_resumed(monkeypatch):
    """A bare --spec compares itself with the checkpoint too: Megatron would drop the norms."""
    training = types.ModuleType("megatron.training")
    training.get_args = lambda: argparse.Namespace(load="folder")
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    saved = argparse.Namespace(
        spec=["normplugin.megatron_plugin.specs", "periln"], normalization="LayerNorm",
        layernorm_epsilon=1e-5, layernorm_zero_centered_gamma=False, qk_layernorm=False,
        multi_latent_attention=False,
    )  # fmt: skip
    monkeypatch.setattr(resume, "saved_arguments", lambda args: saved)
    monkeypatch.setattr(resume, "_folder", lambda args: "folder")
    resume.check_run.cache_clear()
    with pytest.raises(SchemeError, match="got a checkpoint of scheme 'periln' in folder for sch"):
        build_layer(resolve_scheme("preln"), config())
    build_layer(resolve_scheme("periln"), config())
    resume.check_run.cache_clear()
