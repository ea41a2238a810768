"""Whole masked language models: identity with upstream's RoBERTa, the reference, the head."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from fairseq.models.roberta import RobertaModel
from fairseq_builders import build_model
from kinds import SOURCE, assert_bit_identical, every, loss_and_gradients, reference_state

from normplugin.errors import CheckpointError
from normplugin.fairseq_plugin.masked_lm import NormMaskedLanguageModel
from normplugin.fairseq_plugin.sites import NORM_MARK
from normplugin.reference_model import ReferenceEncoder
from normplugin.testing import randomize_

EVERY = every("_mlm")
TASK = ["--task", "masked_lm"]
SMALL = [
    *("--encoder-layers", "2", "--encoder-embed-dim", "24", "--encoder-ffn-embed-dim", "40"),
    *("--encoder-attention-heads", "4"),
]


def build(*argv: str, **kwargs):
    return build_model(*TASK, *argv, **kwargs)


@cache
def baseline_parameters():
    return dict(build("--arch", "roberta_prenorm", *SMALL).named_parameters())


@pytest.mark.parametrize(
    ("mine", "upstream"),
    [
        ("preln_mlm", "roberta_prenorm"),
        ("preln_mlm --embedding-norm", "roberta_base --encoder-normalize-before"),
        ("postln_mlm --embedding-norm", "roberta_base"),
        ("preln_mlm --untie-weights-roberta", "roberta_prenorm --untie-weights-roberta"),
    ],
)
def test_upstream_bit_for_bit(mine, upstream):
    """Names, start, losses and gradients equal those of fairseq's own RoBERTa exactly."""
    ours, theirs = (build("--arch", *line.split(), *SMALL) for line in (mine, upstream))
    assert type(ours) is NormMaskedLanguageModel and type(theirs) is RobertaModel
    assert_bit_identical(ours, theirs)


@pytest.mark.parametrize("argv", EVERY, ids=" ".join)
def test_a_scheme_starts_from_the_baselines_matrices(argv):
    """All schemes draw upstream's BERT initialisation, the head-scaled projection included."""
    baseline = baseline_parameters()
    for name, parameter in build(*argv, *SMALL).named_parameters():
        if parameter.ndim > 1:
            assert torch.equal(parameter, baseline[name]), name


@pytest.mark.parametrize("options", [[], ["--head-scale", "before-out-proj", "--residual-scale"]])
@pytest.mark.parametrize("argv", EVERY, ids=" ".join)
def test_model_equals_reference(argv, options):
    """Features of every token that is no padding equal the reference's, in both modes."""
    model = build(*argv, *options, "--embedding-norm", "--dropout", "0", "--attention-dropout", "0")
    randomize_(model)
    stack = model.encoder.sentence_encoder
    reference = ReferenceEncoder(
        stack.scheme, stack.card.dims, len(stack.dictionary), torch.nn.functional.gelu
    )
    reference.load_state_dict(reference_state(stack), strict=True)
    padding = SOURCE.eq(1)
    positions = stack.embed_positions(SOURCE)
    expected = reference.features(SOURCE, positions, stack.embed_scale, padding)
    for train in (True, False):
        found = model.train(train)(SOURCE, features_only=True)[0]
        # fp32 through 4 layers: a hundred roundings of 6e-8 on features of order 10.
        torch.testing.assert_close(found[~padding], expected[~padding], rtol=1e-4, atol=2e-4)


def test_only_masked_tokens_are_projected():
    """The head gives the masked tokens' rows of the whole output."""
    model = build("--arch", "normformer_mlm_tiny").eval()
    masked = SOURCE.eq(11) | SOURCE.eq(22)
    torch.testing.assert_close(model(SOURCE, masked_tokens=masked)[0], model(SOURCE)[0][masked])


def test_the_heads_own_norm_is_upstreams_and_spared_from_decay():
    """--norm-type leaves the LM head's LayerNorm alone; it is marked as a norm."""
    model = build("--arch", "periln_mlm_tiny", "--norm-type", "rmsnorm")
    norm = model.encoder.lm_head.layer_norm
    assert type(norm) is torch.nn.LayerNorm and getattr(norm.weight, NORM_MARK)
    assert getattr(model.encoder.sentence_encoder.layer_norm.weight, NORM_MARK)
    assert not hasattr(model.encoder.lm_head.bias, NORM_MARK)


@pytest.mark.parametrize("argv", EVERY, ids=" ".join)
def test_checkpoint_activations_gives_equal_gradients(argv):
    """Activation checkpointing changes no gradient, dropout included."""
    argv = [*argv, *SMALL, "--residual-scale"]
    models = [build(*argv, *o) for o in ([], ["--checkpoint-activations"])]
    assert hasattr(models[1].encoder.sentence_encoder.layers[1], "precheckpoint_forward")
    plain, checkpointed = (loss_and_gradients(model, train=True) for model in models)
    for name in plain[1]:
        torch.testing.assert_close(checkpointed[1][name], plain[1][name])


def test_the_longest_input_is_the_tasks():
    """Without --max-positions the model takes what the task gives, as upstream."""
    assert build("--arch", "preln_mlm_tiny").max_positions() == 32
    assert build("--arch", "preln_mlm_tiny", "--max-positions", "48").max_positions() == 48


def test_pruned_layers_carry_their_norms():
    """Layers are dropped in training and pruned on load, added norms included."""
    from fairseq_builders import parse

    argv = ["--arch", "normformer_mlm_tiny"]
    whole = build(*argv, "--encoder-layerdrop", "0.2")
    keep = [*argv, "--encoder-layers-to-keep", "1,3"]
    pruned = build(*keep)
    pruned.load_state_dict(whole.state_dict(), model_cfg=parse(*TASK, *keep).model)
    kept = pruned.encoder.sentence_encoder.layers
    assert len(kept) == 2
    theirs = dict(whole.encoder.sentence_encoder.layers[3].named_parameters())
    for name, parameter in kept[1].named_parameters():
        assert torch.equal(parameter, theirs[name]), name


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--arch", "periln_mlm_tiny"], "scheme 'normformer' does not fit .*'periln'"),
        (["--arch", "normformer_mlm_tiny", "--norm-type", "rmsnorm"], "layernorm.*rmsnorm"),
        (["--arch", "normformer_tiny", "--task", "language_modeling"], "kind masked_lm in the"),
    ],
)
def test_other_architectures_are_refused(argv, message):
    """A masked model's state loads into no other scheme, norm or kind."""
    state = build("--arch", "normformer_mlm_tiny").state_dict()
    with pytest.raises(CheckpointError, match=message):
        build_model(*TASK * ("--task" not in argv), *argv).load_state_dict(state)


def test_a_causal_checkpoint_is_refused():
    """Upstream renames decoder to encoder while loading; the card still tells the kinds apart."""
    state = build_model("--arch", "preln_tiny").state_dict()
    with pytest.raises(CheckpointError, match="kind causal_lm in the file, masked_lm here"):
        build("--arch", "preln_mlm_tiny").load_state_dict(state)


def test_upstreams_checkpoint_loads_into_preln_only():
    """A RoBERTa written by fairseq's own prenorm model continues as preln_mlm."""
    state = build("--arch", "roberta_prenorm", *SMALL).state_dict()
    build("--arch", "preln_mlm", *SMALL, seed=1).load_state_dict(dict(state))
    with pytest.raises(CheckpointError, match="holds no architecture card"):
        build("--arch", "normformer_mlm", *SMALL).load_state_dict(dict(state))
