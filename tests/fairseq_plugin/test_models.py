"""Whole causal language models: promises, presets, identity with upstream, incremental decoding."""

from __future__ import annotations

import math

import pytest
import torch
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq_builders import build_model

from normplugin.errors import SchemeError
from normplugin.fairseq_plugin import sites, stacks
from normplugin.fairseq_plugin.checks import TASKS
from normplugin.fairseq_plugin.models import NormLanguageModel
from normplugin.fairseq_plugin.scheme_options import scheme_of
from normplugin.placement import LETTERS, NAMED_SCHEMES, resolve_scheme
from normplugin.presets import ARCHITECTURES
from normplugin.reference import ReferenceNorm
from normplugin.reference_model import ReferenceDecoderLM
from normplugin.testing import randomize_

SMALL = ["--decoder-layers", "2", "--decoder-embed-dim", "24", "--decoder-ffn-embed-dim", "40"]
EVERY = [["--arch", f"{s}_tiny"] for s in NAMED_SCHEMES] + [
    ["--arch", "preln_tiny", "--norm-scheme", letters] for letters in LETTERS
]
TOKENS = torch.tensor([[2, 10, 11, 12, 13, 9, 8], [2, 20, 21, 22, 23, 24, 25]])


def loss_and_gradients(model, train: bool):
    """Loss and gradients of one batch, as the cross-entropy criterion computes them."""
    model.train(train)
    torch.manual_seed(1)
    logits, _ = model(TOKENS)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [[], ["--share-decoder-input-output-embed"]], ids=["", "tied"])
def test_preln_is_upstream_bit_for_bit(tied):
    """Parameters, losses (dropout on) and gradients of preln equal transformer_lm_gpt's exactly."""
    shape = [*SMALL, "--decoder-attention-heads", "4", *tied]
    mine, upstream = (
        build_model("--arch", arch, *shape) for arch in ("preln", "transformer_lm_gpt")
    )
    assert type(upstream) is TransformerLanguageModel and type(mine) is NormLanguageModel
    for (name, p), (other, q) in zip(
        mine.named_parameters(), upstream.named_parameters(), strict=True
    ):
        assert name == other and torch.equal(p, q)
    for train in (False, True):
        (loss, grads), (their_loss, their_grads) = (
            loss_and_gradients(m, train) for m in (mine, upstream)
        )
        assert torch.equal(loss, their_loss)
        assert all(torch.equal(grads[name], their_grads[name]) for name in their_grads)


@pytest.mark.parametrize("argv", EVERY, ids=" ".join)
def test_a_scheme_starts_from_the_baselines_matrices(argv):
    """All schemes draw the same initial matrices from one seed, so that arms are comparable."""
    baseline = dict(build_model("--arch", "preln_tiny").named_parameters())
    for name, parameter in build_model(*argv).named_parameters():
        if parameter.ndim > 1:
            assert torch.equal(parameter, baseline[name]), name


@pytest.mark.parametrize("argv", EVERY, ids=" ".join)
def test_model_equals_reference(argv):
    """Logits of the whole model equal the reference model's, embedding norm included."""
    model = build_model(*argv, "--embedding-norm", "--share-decoder-input-output-embed").eval()
    randomize_(model)
    decoder, scheme = model.decoder, model.decoder.scheme
    names = sites.reference_names(scheme)
    state = {"token_embedding.weight": decoder.embed_tokens.weight}
    for i, layer in enumerate(decoder.layers):
        state |= {f"layers.{i}.{names[n]}": p for n, p in layer.named_parameters()}
    for site in scheme.stack_sites():
        for name in sites.parameter_names(site, scheme):
            state[f"{site}.{name.rpartition('.')[2]}"] = decoder.get_parameter(name)
    gelu = torch.nn.functional.gelu
    reference = ReferenceDecoderLM(scheme, decoder.card.dims, len(decoder.dictionary), gelu)
    reference.load_state_dict(state, strict=True)
    positions = decoder.embed_positions(TOKENS)
    expected = reference(TOKENS, positions, decoder.embed_scale)
    # fp32 through 4 layers: a hundred roundings of 6e-8 on logits of order 10.
    torch.testing.assert_close(model(TOKENS)[0], expected, rtol=1e-4, atol=2e-4)
    assert any(isinstance(m, ReferenceNorm) for m in reference.stack.values())


@pytest.mark.parametrize("argv", EVERY, ids=" ".join)
def test_incremental_decoding_equals_full_forward(argv):
    """Feeding one token at a time gives the logits of the full forward."""
    model = build_model(*argv).eval()
    randomize_(model)
    expected = model(TOKENS)[0]
    state: dict = {}
    steps = [
        model(TOKENS[:, : t + 1], incremental_state=state)[0][:, -1:] for t in range(TOKENS.size(1))
    ]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("argv", EVERY, ids=" ".join)
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--norm-type", "rmsnorm", "--qk-norm", "head", "--residual-scale", "--embedding-norm"],
        ["--head-scale", "after-out-proj", "--qk-norm", "full", "--norm-zero-centered"],
    ],
    ids=["plain", "rms", "after"],
)
def test_parameters_are_those_promised(argv, options):
    """Every promised norm and scale exists with its shape, and nothing else does."""
    model = build_model(*argv, *options)
    scheme, dims = model.decoder.scheme, model.decoder.card.dims
    linears = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
        for name in ("weight", "bias")
    }
    found = {n: tuple(p.shape) for n, p in model.named_parameters() if n not in linears}
    assert found == sites.promised(scheme, dims)
    per_layer = sum(scheme.count(site, dims) for site in scheme.layer_sites())
    stack = sum(scheme.count(site, dims) for site in scheme.stack_sites())
    counted = sum(math.prod(shape) for shape in found.values())
    assert counted == dims.n_layers * per_layer + stack


def test_a_dropped_norm_stops_the_build(monkeypatch):
    """If a site is silently not built, the build stops and names its parameters."""
    monkeypatch.setattr(stacks.NormStack, "_stack_norm", lambda self, wanted, dims: None)
    with pytest.raises(SchemeError, match=r"missing \['layer_norm.bias'"):
        build_model("--arch", "periln_tiny")


def test_an_extra_norm_stops_the_build(monkeypatch):
    """A norm nobody promised stops the build as well, in a layer and outside."""
    monkeypatch.setattr(stacks, "promised_layer", lambda *scheme_dims_cross: {})
    with pytest.raises(SchemeError, match=r"not promised \['final_layer_norm.bias'"):
        build_model("--arch", "preln_tiny")
    monkeypatch.undo()
    monkeypatch.setattr(stacks, "promised_stack", lambda scheme, dims: {})
    with pytest.raises(SchemeError, match=r"not promised \['layer_norm.bias'"):
        build_model("--arch", "preln_tiny")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_presets_are_applied(name):
    """The instantiated model of every registered name has the documented sizes and scheme."""
    arch = ARCHITECTURES[name]
    model = build_model("--task", TASKS[arch.kind][0], "--arch", name, fake=True)
    found = [m for m in model.modules() if isinstance(m, stacks.NormStack)]
    assert len(found) == (2 if arch.kind == "encoder_decoder" else 1)
    for stack in found:
        layer = stack.layers[0]
        built = (
            len(stack.layers),
            stack.embed_tokens.embedding_dim,
            layer.fc1.out_features,
            layer.self_attn.num_heads,
        )
        dims = arch.dims
        assert built == (dims.n_layers, dims.d_model, dims.d_ffn, dims.n_heads)
        assert stack.scheme.identity() == resolve_scheme(arch.scheme).identity()


def test_command_line_beats_preset():
    """A size given on the command line wins over the architecture's."""
    decoder = build_model("--arch", "periln", *SMALL, "--decoder-attention-heads", "4").decoder
    assert (len(decoder.layers), decoder.embed_dim) == (2, 24)


def test_every_option_reaches_the_layers():
    """Each option, given a non-default value, shows in the built layers."""
    decoder = build_model(
        "--arch", "normformer_tiny",
        "--norm-type", "rmsnorm",
        "--norm-eps", "0.003",
        "--norm-zero-centered",
        "--head-scale", "after-out-proj",
        "--residual-scale",
        "--qk-norm", "head",
        "--embedding-norm",
        "--output-norm-init", "0.25",
        "--recompute-ffn-norm",
    ).decoder  # fmt: skip
    layer = decoder.layers[1]
    assert layer.self_attn.output_norm.spec == decoder.scheme.norm
    assert (decoder.scheme.norm.type, decoder.scheme.norm.eps) == ("rmsnorm", 0.003)
    assert decoder.scheme.norm.zero_centered
    assert layer.self_attn.head_scale is not None and layer.w_resid is not None
    assert layer.self_attn.q_proj.output_norm.weight.numel() == 32
    assert decoder.layernorm_embedding is not None
    assert layer.self_attn.output_norm.gain.unique().item() == 0.25
    assert layer.fc2.recompute


def test_recompute_changes_nothing_but_memory():
    """--recompute-ffn-norm leaves loss and gradients as they are."""
    shape = ["--arch", "normformer_tiny"]
    plain, again = (
        loss_and_gradients(build_model(*shape, *o), train=True)
        for o in ([], ["--recompute-ffn-norm"])
    )
    torch.testing.assert_close(again[0], plain[0], rtol=1e-6, atol=0)
    for name in plain[1]:
        # fp32, another order of the same sums
        torch.testing.assert_close(again[1][name], plain[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("argv", EVERY, ids=" ".join)
def test_half_precision_trains(argv, dtype):
    """The model converted as --bf16 and --fp16 convert it gives finite gradients in its dtype."""
    model = build_model(*argv, "--qk-norm", "head", "--residual-scale").to(dtype)
    loss, gradients = loss_and_gradients(model, train=True)
    assert loss.isfinite() and abs(loss.item() - math.log(64)) < 3
    for name, gradient in gradients.items():
        assert gradient.dtype == dtype and gradient.isfinite().all(), name


@pytest.mark.parametrize("argv", [*EVERY, ["--arch", "transformer_lm_gpt"]], ids=" ".join)
def test_checkpoint_activations_gives_equal_gradients(argv):
    """Activation checkpointing changes no gradient."""
    shape = [*SMALL, "--decoder-attention-heads", "4", "--activation-fn", "gelu"]
    argv = [*argv, *shape, "--dropout", "0", "--attention-dropout", "0"]
    plain, checkpointed = (
        loss_and_gradients(build_model(*argv, *o), train=True)
        for o in ([], ["--checkpoint-activations"])
    )
    for name in plain[1]:
        torch.testing.assert_close(checkpointed[1][name], plain[1][name])


def test_scheme_and_dims_come_from_the_config():
    """What the layers get is what the config says, through fairseq's own config objects."""
    from fairseq_builders import parse

    cfg = parse("--task", "language_modeling", "--arch", "preln_tiny", "--norm-scheme", "c+a").model
    assert scheme_of(cfg).name == "A+C"
    assert cfg.decoder_embed_dim == ARCHITECTURES["preln_tiny"].dims.d_model
