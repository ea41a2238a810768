"""Whole encoder-decoders: identity with upstream's transformer, the reference, decoding."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq_builders import build_model, parse
from kinds import (
    SOURCE,
    TARGET,
    assert_bit_identical,
    every,
    logits,
    loss_and_gradients,
    reference_state,
)

from normplugin.errors import CheckpointError
from normplugin.fairseq_plugin.checkpoint import find_cards, promised_by
from normplugin.fairseq_plugin.translation import NormTransformer
from normplugin.reference_model import ReferenceEncoderDecoder
from normplugin.testing import randomize_

EVERY = every("_mt")
TASK = ["--task", "translation"]
SIDES = ("encoder", "decoder")
SMALL = [
    word
    for side in SIDES
    for word in (
        *(f"--{side}-layers", "2", f"--{side}-embed-dim", "24", f"--{side}-ffn-embed-dim", "40"),
        *(f"--{side}-attention-heads", "4"),
    )
]
PRE = "--encoder-normalize-before --decoder-normalize-before"
NO_DROPOUT = ["--dropout", "0"]


def build(*argv: str, **kwargs):
    return build_model(*TASK, *argv, **kwargs)


@cache
def baseline_parameters():
    return dict(build("--arch", "transformer", *SMALL).named_parameters())


@pytest.mark.parametrize(
    "tied", ["", "--share-all-embeddings", "--share-decoder-input-output-embed"]
)
@pytest.mark.parametrize(
    ("mine", "upstream"), [("preln_mt", f"transformer {PRE}"), ("postln_mt", "transformer")]
)
def test_upstream_bit_for_bit(mine, upstream, tied):
    """Names, start, losses and gradients equal those of fairseq's own transformer exactly."""
    lines = (f"{line} {tied}" for line in (mine, upstream))
    ours, theirs = (build("--arch", *line.split(), *SMALL) for line in lines)
    assert type(ours) is NormTransformer and type(theirs) is TransformerModel
    assert_bit_identical(ours, theirs)


@pytest.mark.parametrize("options", [[], ["--head-scale", "before-out-proj", "--residual-scale"]])
@pytest.mark.parametrize("argv", EVERY, ids=" ".join)
def test_model_equals_reference(argv, options):
    """Logits and every gradient equal the reference's, with padding on both sides."""
    shared = ["--embedding-norm", "--share-decoder-input-output-embed", "--activation-fn", "tanh"]
    model = build(*argv, *options, *shared, *SMALL, *NO_DROPOUT)
    randomize_(model)
    encoder, decoder = model.encoder, model.decoder
    reference = ReferenceEncoderDecoder(
        decoder.scheme, decoder.card.dims, len(decoder.dictionary), torch.tanh
    )
    state = {
        **{f"encoder.{n}": p for n, p in reference_state(encoder).items()},
        **{f"decoder.{n}": p for n, p in reference_state(decoder, True).items()},
    }
    reference.load_state_dict(state, strict=True)
    expected = reference(
        SOURCE,
        TARGET,
        source_positions=encoder.embed_positions(SOURCE),
        target_positions=decoder.embed_positions(TARGET),
        embed_scale=encoder.embed_scale,
        source_padding=SOURCE.eq(1),
        target_padding=TARGET.eq(1),
    )
    real = TARGET.ne(1)
    for train in (True, False):
        found = logits(model.train(train))
        # fp32 through 4 layers: a hundred roundings of 6e-8 on logits of order 10.
        torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=2e-4)
    weights = torch.randn(expected[real].shape)
    (logits(model.train())[real] * weights).sum().backward()
    (expected[real] * weights).sum().backward()
    theirs = {name: p.grad for name, p in reference.named_parameters()}
    names = {id(p): name for name, p in state.items()}
    for name, parameter in model.named_parameters():
        gradient = theirs[names[id(parameter)]]
        size = gradient.abs().max().clamp(min=1.0)
        torch.testing.assert_close(
            parameter.grad / size, gradient / size, rtol=0, atol=2e-4, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("argv", EVERY, ids=" ".join)
def test_a_scheme_starts_from_the_baselines_matrices(argv):
    """All schemes draw the same initial matrices from one seed."""
    baseline = baseline_parameters()
    for name, parameter in build(*argv, *SMALL).named_parameters():
        if parameter.ndim > 1:
            assert torch.equal(parameter, baseline[name]), name


@pytest.mark.parametrize("argv", EVERY, ids=" ".join)
def test_incremental_decoding_and_beam_search_equal_the_full_forward(argv):
    """One token at a time gives the full forward's logits; beam search's scores are theirs."""
    options = ["--qk-norm", "full", "--head-scale", "after-out-proj", "--residual-scale"]
    model = build(*argv, *options, *SMALL).eval()
    randomize_(model)
    target = TARGET[:, :4]
    memory = model.encoder(SOURCE)
    expected = model.decoder(target, encoder_out=memory)[0]
    state: dict = {}
    for t in range(1, target.size(1) + 1):
        step = model.decoder(target[:, :t], encoder_out=memory, incremental_state=state)[0]
        # fp32 and another order of the sums, on logits of order 10
        torch.testing.assert_close(step[:, -1], expected[:, t - 1], rtol=1e-4, atol=2e-4)

    generator = SequenceGenerator(
        [model], model.decoder.dictionary, beam_size=3, max_len_b=6, normalize_scores=False
    )
    for i, hypotheses in enumerate(generator.generate([model], {"net_input": {
        "src_tokens": SOURCE, "src_lengths": SOURCE.ne(1).sum(1)}})):  # fmt: skip
        tokens = hypotheses[0]["tokens"]
        shifted = torch.cat([torch.tensor([2]), tokens[:-1]])[None]
        scores = model(SOURCE[i : i + 1], None, shifted)[0].log_softmax(-1)
        total = scores[0].gather(-1, tokens[:, None]).sum()
        torch.testing.assert_close(hypotheses[0]["score"], total, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("argv", EVERY, ids=" ".join)
def test_alignment(argv):
    """Cross-attention weights come out for --print-alignment, and change no output."""
    model = build(*argv, *SMALL).eval()
    randomize_(model)
    plain = logits(model)
    found, extra = model(SOURCE, None, TARGET, alignment_layer=0, alignment_heads=2)
    weights = extra["attn"][0]
    assert weights.shape == (2, TARGET.size(1), SOURCE.size(1))
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]))
    assert weights[1, :, :2].abs().max() == 0  # padding
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("argv", EVERY, ids=" ".join)
def test_checkpoint_activations_gives_equal_gradients(argv):
    """Activation checkpointing changes no gradient, dropout included."""
    argv = [*argv, *SMALL, "--residual-scale"]
    models = [build(*argv, *o) for o in ([], ["--checkpoint-activations"])]
    assert hasattr(models[1].decoder.layers[1], "precheckpoint_forward")
    plain, checkpointed = (loss_and_gradients(model, train=True) for model in models)
    for name in plain[1]:
        torch.testing.assert_close(checkpointed[1][name], plain[1][name])


@pytest.mark.parametrize(
    "line",
    [
        "--arch normformer_mt_tiny --adaptive-softmax-cutoff 20,40 --criterion adaptive_loss",
        "--arch periln_mt_tiny --quant-noise-pq 0.1",
        "--arch outputln_mt_tiny --encoder-learned-pos --decoder-learned-pos",
        "--arch normformer_mt_tiny --encoder-embed-dim 64 --share-decoder-input-output-embed",
        "--arch postln_mt_tiny --decoder-output-dim 64 --no-token-positional-embeddings",
        "--arch preln_mt_tiny --encoder-layerdrop 0.2 --decoder-layerdrop 0.2",
        "--arch normformer_mt_tiny --activation-dropout 0.1 --activation-fn relu_squared",
    ],
)
def test_legal_mixes_train(line):
    """Upstream options that fit a scheme stay usable: every promised parameter gets a gradient."""
    model = build(*line.split())
    if "adaptive" in line:
        features = model.extract_features(SOURCE, None, TARGET)[0]
        loss = model.decoder.adaptive_softmax(features.flatten(0, 1), TARGET.flatten())[0][0].sum()
        loss.backward()
    else:
        loss_and_gradients(model, train=True)
    promise = promised_by({side: getattr(model, side).card for side in SIDES})
    found = dict(model.named_parameters())
    for name, shape in promise.items():
        assert tuple(found[name].shape) == shape
        if "layerdrop" not in line:
            assert found[name].grad is not None, name


def test_pruned_layers_carry_their_norms():
    """Layers of both stacks are pruned on load, added norms included."""
    argv = ["--arch", "normformer_mt_tiny"]
    whole = build(*argv, "--encoder-layerdrop", "0.2", "--decoder-layerdrop", "0.2")
    keep = [*argv, "--encoder-layers-to-keep", "1,3", "--decoder-layers-to-keep", "0,2"]
    pruned = build(*keep)
    pruned.load_state_dict(whole.state_dict(), model_cfg=parse(*TASK, *keep).model)
    for side, last in (("encoder", 3), ("decoder", 2)):
        layers = getattr(pruned, side).layers
        assert len(layers) == 2
        theirs = dict(getattr(whole, side).layers[last].named_parameters())
        for name, parameter in layers[1].named_parameters():
            assert torch.equal(parameter, theirs[name]), name


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--arch", "normformer_mt_tiny"], "scheme 'periln' does not fit"),
        (["--arch", "periln_mt_tiny", "--norm-eps", "1e-3"], "norm .*0.001"),
        (["--arch", "periln_mt_tiny", "--encoder-ffn-embed-dim", "64"], "d_ffn 512 in the file"),
        (["--arch", "periln_tiny", "--task", "language_modeling"], "kind encoder_decoder in the"),
    ],
)
def test_other_architectures_are_refused(argv, message):
    """An encoder-decoder's state loads into no other scheme, norm, width or kind."""
    state = build("--arch", "periln_mt_tiny").state_dict()
    assert set(find_cards(state)) == set(SIDES)
    with pytest.raises(CheckpointError, match=message):
        build_model(*TASK * ("--task" not in argv), *argv).load_state_dict(state)


def test_upstreams_checkpoint_loads_into_preln_only():
    """A transformer written by fairseq's own Pre-LN model continues as preln_mt, sizes unequal."""
    uneven = [*SMALL, "--encoder-ffn-embed-dim", "48"]
    state = build("--arch", *f"transformer {PRE}".split(), *uneven).state_dict()
    build("--arch", "preln_mt", *uneven, seed=1).load_state_dict(dict(state))
    with pytest.raises(CheckpointError, match="holds no architecture card"):
        build("--arch", "postln_mt", *uneven).load_state_dict(dict(state))
