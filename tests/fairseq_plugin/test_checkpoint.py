"""The architecture card in a checkpoint, and loading."""

from __future__ import annotations

import pytest
import torch
from fairseq_builders import build_model

from normplugin.errors import CheckpointError
from normplugin.fairseq_plugin.checkpoint import Card, find_cards, inspect, load, to_bits, to_text
from normplugin.placement import SCHEMES, Dims, resolve_scheme

DIMS = Dims(4, 128, 512, 4)


@pytest.mark.parametrize("name", SCHEMES)
def test_card_round_trip(name):
    """What is encoded is decoded, also after averaging and half-precision conversion."""
    scheme = resolve_scheme(name, norm_type="rmsnorm", qk_norm="head", norm_eps=1e-6)
    card = Card(scheme, DIMS, "causal_lm")
    encoded = card.encode()
    assert Card.decode(encoded) == card
    averaged = sum([encoded.half() for _ in range(10)]) / 10
    assert Card.decode(averaged).hash == card.hash
    for _ in range(100):  # fairseq's EMA
        averaged.mul_(0.9).add_(encoded.half(), alpha=0.1)
    assert Card.decode(averaged.bfloat16()).hash == card.hash


@pytest.mark.parametrize(
    "encoded",
    [
        torch.tensor([1, 2, 3]),
        torch.ones(8),
        torch.zeros(16),
        Card(resolve_scheme("preln"), DIMS, "causal_lm").encode()[:-4],
    ],
)
def test_damaged_card(encoded):
    """A card that is cut or overwritten is refused."""
    with pytest.raises(CheckpointError, match="card cannot be read"):
        Card.decode(encoded)


def test_edited_card():
    """A card whose content no longer gives its hash is refused."""
    encoded = Card(resolve_scheme("preln"), DIMS, "causal_lm").encode()
    text = to_text(encoded).replace('"n_heads": 4', '"n_heads": 8')
    with pytest.raises(CheckpointError, match="its hash is"):
        Card.decode(to_bits(text))


def test_the_card_is_in_the_state_and_no_parameter():
    """Every model's state holds its card; the parameters stay upstream's."""
    model = build_model("--arch", "preln_tiny")
    assert find_cards(model.state_dict()) == {"decoder": model.decoder.card}
    assert not any("card" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--arch", "normformer_tiny"], "attention A in the file, AB here"),
        (["--arch", "periln_tiny", "--norm-eps", "1e-3"], "scheme 'preln' does not fit"),
        (["--arch", "preln_tiny", "--norm-type", "rmsnorm"], "norm .*rmsnorm"),
        (["--arch", "preln_tiny", "--decoder-ffn-embed-dim", "256"], "d_ffn 512 in the file"),
    ],
)
def test_other_architectures_are_refused(argv, message):
    """Loading into another scheme, norm or width names the difference."""
    state = build_model("--arch", "preln_tiny").state_dict()
    with pytest.raises(CheckpointError, match=message):
        build_model(*argv).load_state_dict(state)


@pytest.mark.parametrize(
    "argv",
    [
        ["--arch", "periln_tiny"],
        ["--arch", "periln_mlm_tiny", "--task", "masked_lm"],
        ["--arch", "periln_mt_tiny", "--task", "translation"],
    ],
    ids=" ".join,
)
def test_another_vocabulary_is_refused(argv):
    """The sizes of both are named."""
    state = build_model(*argv).state_dict()
    with pytest.raises(
        CheckpointError, match=r"its vocabulary has 6[45] entries, the data's 3[45]"
    ):
        build_model(*argv, symbols=30).load_state_dict(state)


def test_layers_to_keep(tmp_path):
    """fairseq's layer pruning carries the added norms along."""
    whole = build_model("--arch", "periln_tiny", "--decoder-layerdrop", "0.2")
    pruned = build_model("--arch", "periln_tiny", "--decoder-layers-to-keep", "0,2")
    from fairseq_builders import parse

    cfg = parse(
        "--task", "language_modeling", "--arch", "periln_tiny", "--decoder-layers-to-keep", "0,2",
        "--decoder-layers", "2",
    ).model  # fmt: skip
    pruned.load_state_dict(whole.state_dict(), model_cfg=cfg)
    kept, original = pruned.decoder.layers[1], whole.decoder.layers[2]
    for name, parameter in kept.named_parameters():
        assert torch.equal(parameter, original.get_parameter(name)), name


def test_loading_says_what_is_wrong(tmp_path):
    """Missing, damaged, sharded and foreign files each end with advice."""
    with pytest.raises(CheckpointError, match="no such file"):
        load(tmp_path / "none.pt")
    (tmp_path / "bad.pt").write_bytes(b"PK\x03\x04 not a checkpoint")
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        load(tmp_path / "bad.pt")
    for name, file in (("checkpoint_last-shard0", {}), ("renamed", {"fsdp_metadata": {}})):
        torch.save({"model": {}, **file}, tmp_path / f"{name}.pt")
        with pytest.raises(CheckpointError, match="Consolidate the shards"):
            load(tmp_path / f"{name}.pt")
    torch.save({"model": {"w": torch.zeros(2)}}, tmp_path / "foreign.pt")
    with pytest.raises(CheckpointError, match="no architecture card"):
        inspect(tmp_path / "foreign.pt")


def test_missing_norms_are_found(tmp_path):
    """A file whose card promises norms it does not hold is reported with their names."""
    state = build_model("--arch", "periln_tiny").state_dict()
    del state["decoder.layers.3.fc2.output_norm.weight"]
    torch.save({"model": state}, tmp_path / "cut.pt")
    assert inspect(tmp_path / "cut.pt").missing == ["decoder.layers.3.fc2.output_norm.weight"]
