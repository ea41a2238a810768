"""The probe on fairseq's models, ours and upstream's: exact, unseen, once, and gone afterwards."""

from __future__ import annotations

import pytest
import torch
from fairseq.models.transformer import TransformerEncoderBase
from fairseq.modules import FairseqDropout
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq_builders import build_model
from kinds import SOURCE, TARGET, every
from torch import nn

from normplugin.diagnostics import quantities
from normplugin.diagnostics.fairseq_map import map_model
from normplugin.diagnostics.mapping import Place
from normplugin.diagnostics.options import DiagnosticsError
from normplugin.diagnostics.probe import Probe
from normplugin.diagnostics.session import summarize
from normplugin.diagnostics.tally import Key

SMALL = "--decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 48".split()
SMALL += "--decoder-attention-heads 4 --dropout 0.3 --attention-dropout 0.0".split()
TINY_MT = "--encoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 48".split()
TINY_MT += ["--encoder-attention-heads", "4", *SMALL, "--task", "translation"]
OUR_LM = [[*argv, *SMALL] for argv in every("")]
RESIDUAL = ["--arch", "preln_tiny", "--residual-scale", *SMALL]
UPSTREAM = [
    ["--arch", "transformer_lm_gpt", *SMALL],
    ["--arch", "transformer_lm", *SMALL],
    ["--arch", "transformer", *TINY_MT],
    ["--arch", "transformer", "--encoder-normalize-before", "--decoder-normalize-before", *TINY_MT],
    "--arch roberta_base --task masked_lm --encoder-layers 2 --encoder-embed-dim 32 "
    "--encoder-ffn-embed-dim 48 --encoder-attention-heads 4 --dropout 0.3".split(),
]


TOKENS = torch.arange(5, 19).view(2, 7)


def logits(model: nn.Module) -> torch.Tensor:
    """Of a batch without padding; of a padded one where there are two stacks."""
    if isinstance(getattr(model, "encoder", None), TransformerEncoderBase):
        return model(SOURCE, None, TARGET)[0]
    return model(TOKENS)[0]


def name(argv: list[str]) -> str:
    return "_".join(word for word in argv[1:4] if "-" not in word or "norm" in word)


def randomised(argv: list[str]) -> nn.Module:
    """A model in training mode whose gains and scales differ from 1."""
    model = build_model(*argv).train()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def forward_backward(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(5)
    loss = logits(model).float().log_softmax(-1)[..., 7].mean()
    loss.backward()
    return loss.detach()


def measured(model: nn.Module, passes: int = 1) -> dict:
    """(stack, layer, part, name) -> value of one update; the probe is gone afterwards."""
    probe = Probe(map_model(model))
    probe.attach()
    for _ in range(passes):
        forward_backward(model)
    probe.detach()
    probe.add_gradients(lambda p: p.grad, 1.0 / passes)
    probe.add_gains()
    return {r.place[1:]: r.value for r in summarize(probe.read(), 1)}


def captured(model: nn.Module, *modules: nn.Module) -> list[list[torch.Tensor]]:
    """Everything these modules put out during one forward pass."""
    found: list[list[torch.Tensor]] = [[] for _ in modules]

    def keep(into):
        return lambda module, args, out: into.append(
            (out[0] if isinstance(out, tuple) else out).detach().clone()
        )

    handles = [m.register_forward_hook(keep(f)) for m, f in zip(modules, found, strict=True)]
    torch.manual_seed(5)
    logits(model)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("argv", [*OUR_LM, RESIDUAL, *UPSTREAM], ids=name)
def test_contributions_add_up(argv, monkeypatch):
    """stream[l] = stream[l-1] + contributions, and each is what the block's formula says.

    The dropout module's output is B(F(.)) after dropout: the whole contribution without residual
    scale and C; with C, what the norm makes of the sum less what was there.
    """
    model = randomised(argv)
    seen: list[torch.Tensor] = []
    spied = quantities.contribution
    monkeypatch.setattr(quantities, "contribution", lambda *xs: seen.append(spied(*xs)) or seen[-1])
    found = measured(model)
    at = 0
    for layer in map_model(model).layers:
        module, parts = layer.module, len(layer.parts)
        contributions, at = seen[at : at + parts], at + parts
        slots = [m for n, m in module.named_children() if n.endswith("layer_norm")]
        entry: list[torch.Tensor] = []
        handle = module.register_forward_pre_hook(lambda m, args, e=entry: e.append(args[0]))
        drop = next(m for m in module.children() if isinstance(m, FairseqDropout))
        outs, branches, *normed = captured(model, module, drop, *slots)
        handle.remove()
        torch.testing.assert_close(entry[0] + sum(contributions), outs[0])
        x = entry[0]
        for i, (part, added) in enumerate(zip(layer.parts, contributions, strict=True)):
            scale = getattr(module, "w_resid", None) if part == "ffn" else None
            expected = branches[i] if scale is None else (scale - 1) * x + branches[i]
            if not module.normalize_before:
                expected = normed[i][0] - x
            torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-5)
            variance = found[(layer.stack, layer.number, part, "contribution_variance")]
            if layer.stack == "decoder" and not any("trans" in a for a in argv):  # no padding
                assert variance == pytest.approx(expected.var(-1, correction=0).mean().item(), 1e-4)
            x = x + added
    assert at == len(seen)


def test_numbers_are_the_plain_formulas():
    """Streams, raw outputs, gradients and gains of a NormFormer, from plain hooks."""
    model = randomised(["--arch", "normformer_tiny", "--residual-scale", *SMALL])
    found = {key[1:]: value for key, value in measured(model).items() if key[0] == "decoder"}
    first, second = model.decoder.layers
    entry = []
    handle = first.register_forward_pre_hook(lambda m, args: entry.append(args[0].detach()))
    into_norm = []
    norm = second.self_attn.output_norm
    other = norm.register_forward_pre_hook(lambda m, args: into_norm.append(args[0].detach()))
    (one,), (two,), (fc2,) = captured(model, first, second, second.fc2)
    handle.remove()
    other.remove()
    for layer, x in ((0, entry[0]), (1, one), (2, two)):
        expected = x.var(-1, correction=0).mean().item()
        assert found[(layer, "stream", "variance")] == pytest.approx(expected, 1e-5)
        assert found[(layer, "stream", "max_abs")] == x.abs().max().item()
    bits = torch.log2(65504 / two.abs().max()).item()
    assert found[(2, "stream", "headroom_bits")] == pytest.approx(bits, 1e-5)
    angle = (torch.cosine_similarity(one, two, dim=-1).acos() / torch.pi).mean().item()
    assert found[(2, "stream", "angular_distance")] == pytest.approx(angle, 1e-4)
    for part, x in (("attention", into_norm[0]), ("ffn", fc2)):
        expected = x.var(-1, correction=0).mean().item()
        assert found[(2, part, "raw_variance")] == pytest.approx(expected, 1e-5)
        assert found[(2, part, "raw_max_abs")] == x.abs().max().item()

    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    mine = {n: g for n, g in grads.items() if n.startswith("decoder.layers.1.")}
    norms = {n for n in mine if "norm" in n or n.endswith(("head_scale", "w_resid"))}
    attention = {n for n in mine if ".self_attn." in n} - norms
    for part, names in (
        ("norms", norms),
        ("attention", attention),
        ("ffn", set(mine) - norms - attention),
        ("fc2", {"decoder.layers.1.fc2.weight"}),
    ):
        flat = torch.cat([mine[n].flatten() for n in names])
        assert found[(2, part, "gradient_norm")] == pytest.approx(flat.norm().item(), 1e-5)
        mean = flat.abs().mean().item()
        assert found[(2, part, "gradient_mean_abs")] == pytest.approx(mean, 1e-5)
    ratio = first.fc2.weight.grad.abs().mean() / second.fc2.weight.grad.abs().mean()
    found_ratio = found[(None, "fc2", "gradient_mean_abs_first_over_last")]
    assert found_ratio == pytest.approx(ratio.item(), 1e-5)

    for part, gain in (
        ("attention.input", second.self_attn_layer_norm.weight),
        ("attention.output", norm.weight),
        ("attention.head_scale", second.self_attn.out_proj.head_scale),
        ("ffn.input", second.final_layer_norm.weight),
        ("ffn.hidden", second.fc2.hidden_norm.weight),
        ("ffn.residual_scale", second.w_resid),
    ):
        expected = [gain.mean().item(), gain.min().item(), gain.max().item()]
        names = ("gain_mean", "gain_min", "gain_max")
        assert [found[(2, part, n)] for n in names] == pytest.approx(expected, 1e-5)


@pytest.mark.parametrize("argv", [OUR_LM[3], UPSTREAM[0], UPSTREAM[2], UPSTREAM[4]], ids=name)
def test_whole_gradient_norm_counts_every_tensor_once(argv):
    """Over all parts it is the norm over model.parameters(), which has tied embeddings once."""
    model = randomised([*argv, *["--share-decoder-input-output-embed"] * ("masked_lm" not in argv)])
    found = measured(model)
    total = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert found[("", None, "run", "gradient_norm")] == pytest.approx(total.item(), 1e-5)
    assert sum(key[2:] == ("embeddings", "gradient_norm") for key in found) <= 2


def test_hooks_change_nothing_and_go():
    """Loss, gradients and random state are bit-identical with and without; no hook stays."""
    results = []
    for probed in (False, True):
        model = randomised(OUR_LM[3])
        probe = Probe(map_model(model))
        if probed:
            probe.attach()
        loss = forward_backward(model)
        probe.detach()
        results.append([loss, torch.get_rng_state(), *(p.grad for p in model.parameters())])
        for module in model.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_recomputed_activations_are_counted_once():
    """Under activation checkpointing every number and every token count is the plain one's."""
    found = []
    for checkpointed in (False, True):
        model = randomised(["--arch", "normformer_tiny", *SMALL])
        if checkpointed:
            for layer in model.decoder.layers:
                checkpoint_wrapper(layer)
        probe = Probe(map_model(model))
        probe.attach()
        forward_backward(model)
        found.append((probe.read(), {k: w.item() for k, w in probe.tally._weights.items()}))
    assert found[0] == found[1]
    key = Key(Place("decoder", 2, "ffn"), "raw_variance", "mean")
    assert found[0][1][key] == 2 * 7


def test_skipped_layers_are_null_and_not_zero():
    """LayerDrop: a layer that no micro-batch entered has null everywhere, its gradient too."""
    model = randomised(["--arch", "periln_tiny", *SMALL, "--decoder-layerdrop", "0.5"])
    layers = list(model.decoder.layers.children())
    model.decoder.layers = nn.ModuleList(layers[:1])
    probe_map = map_model(model)
    model.decoder.layers = nn.ModuleList(layers)
    full = map_model(model)
    assert len(probe_map.layers) == 1 and len(full.layers) == 2
    probe = Probe(full)
    probe.attach()
    model.decoder.layers = nn.ModuleList(layers[:1])
    forward_backward(model)
    for parameter in layers[1].parameters():
        parameter.grad = torch.zeros_like(parameter)  # as legacy_ddp does
    probe.add_gradients(lambda p: p.grad)
    probe.add_gains()
    values = {r.place[1:]: r.value for r in summarize(probe.read(), 1)}
    skipped = {k: v for k, v in values.items() if k[1] == 2 and not k[3].startswith("gain")}
    assert len(skipped) > 12 and set(skipped.values()) == {None}
    entered = [v for k, v in values.items() if k[1] == 1]
    assert None not in entered
    assert values[("decoder", 2, "ffn.output", "gain_mean")] is not None


def test_padding_is_left_out():
    """The numbers of a padded batch are those over its real tokens, in encoder and decoder."""
    model = randomised(UPSTREAM[3])
    found = measured(model)
    encoder, decoder = model.encoder.layers[1], model.decoder.layers[1]
    (e,), (d,) = captured(model, encoder, decoder)
    for stack, x, real in (
        ("encoder", e, [(t, b) for b in range(2) for t in range(7) if b == 0 or t >= 2]),
        ("decoder", d, [(t, b) for b in range(2) for t in range(6) if b == 0 or t < 4]),
    ):
        kept = torch.stack([x[t, b] for t, b in real])
        expected = kept.var(-1, correction=0).mean().item()
        assert found[(stack, 2, "stream", "variance")] == pytest.approx(expected, 1e-5)
        assert found[(stack, 2, "stream", "max_abs")] == kept.abs().max().item()


def test_paused_batches_do_not_count():
    """What passes while the probe is paused leaves no trace."""
    model = randomised(OUR_LM[0])
    probe = Probe(map_model(model))
    probe.attach()
    probe.paused = True
    forward_backward(model)
    assert set(probe.read().values()) == {None}


def test_models_without_transformer_layers_are_refused():
    """One sentence."""
    with pytest.raises(DiagnosticsError, match="--diagnostics-interval: got a Linear; it has no"):
        map_model(nn.Linear(2, 2))
