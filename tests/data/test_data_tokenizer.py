"""sentencepiece models, trained and given, and what becomes of their special pieces."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece
from data_text import ODD_LINES, plain_lines

from normplugin.cli import main
from normplugin.data import manifest, vocabulary
from normplugin.data.settings import TokenizerSettings
from normplugin.data.tokenizer import Tokenizer, load
from normplugin.errors import DataError

pytest.importorskip("fairseq")
pytest.importorskip("megatron.core")


def trained(**options: object) -> bytes:
    """Return a sentencepiece model made without normplugin."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*plain_lines(200), *ODD_LINES[:8]]),
        model_writer=model,
        **{"vocab_size": 350, "byte_fallback": True, "minloglevel": 2, **options},
    )
    return model.getvalue()


MODELS = {
    "default": ({}, 1),
    "pad_id_3": ({"pad_id": 3, "user_defined_symbols": ["<mask>"]}, 0),
    "user_pad": ({"user_defined_symbols": ["<pad>", "<mask>", "\n", " "]}, 1),
    "control_pad": ({"control_symbols": ["<pad>", "<mask>"]}, 0),
    "user_s": ({"bos_id": -1, "user_defined_symbols": ["<s>"]}, 3),
    "t5": ({"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}, 1),
    "late_eos": ({"unk_id": 0, "bos_id": -1, "eos_id": 5, "pad_id": -1}, 3),
}


@pytest.mark.parametrize("name", MODELS)
def test_given_tokenizer(name: str, tmp_path: Path, txt: Path) -> None:
    """Any model: the dictionary loads, specials have one index, text ids one offset."""
    from fairseq.data import Dictionary

    options, offset = MODELS[name]
    model = tmp_path / "given.model"
    model.write_bytes(trained(**options))
    out = tmp_path / "out"
    command = ["prepare", str(txt), "--tokenizer", str(model), "--out", str(out), "--quiet"]
    assert main(command) == 0
    record = manifest.verify(out)
    assert record.offset == offset
    dictionary = Dictionary.load(str(out / "fairseq" / "dict.txt"))
    assert len(dictionary) == record.vocabulary["fairseq_rows"]
    for index, word in enumerate(vocabulary.FAIRSEQ_SPECIALS):
        assert dictionary.index(word) == index and dictionary.symbols.count(word) == 1
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.read_bytes())
    for piece in ("\u2581norm", "a", "<0x41>"):
        assert dictionary.index(piece) == processor.piece_to_id(piece) + offset


def test_id_map_is_one_to_one() -> None:
    """No two pieces of any model share a fairseq id, and every id is inside the dictionary."""
    for options, _ in MODELS.values():
        processor = sentencepiece.SentencePieceProcessor(model_proto=trained(**options))
        ids = vocabulary.build(processor)
        assert len(set(ids.fairseq_ids.tolist())) == ids.pieces
        assert 0 <= ids.fairseq_ids.min() and ids.fairseq_ids.max() < ids.fairseq_rows


@pytest.mark.parametrize("name", MODELS)
def test_text_is_never_control(name: str) -> None:
    """A plain <s>, </s>, <pad> or <unk> in the text never maps to fairseq's bos, pad or eos."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=trained(**MODELS[name][0]))
    ids = vocabulary.build(processor).fairseq_ids[processor.encode(ODD_LINES[6])]
    assert not set(ids.tolist()) & {0, 1, 2}


def test_mask_symbol_is_reused(tmp_path: Path) -> None:
    """A model with its own <mask>: fairseq's masked_lm finds that row and adds none."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=trained(**MODELS["pad_id_3"][0]))
    ids = vocabulary.build(processor)
    assert ids.symbols.count("<mask>") == 1
    assert ids.symbols.index("<mask>") + 4 == processor.piece_to_id("<mask>") + ids.offset


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("normalization", ["identity", "nmt_nfkc"])
def test_decode_is_normalised_text(
    model_type: str, keep: bool, normalization: str, tmp_path: Path, txt: Path
) -> None:
    """Decoding gives sentencepiece's normalised text, with newlines, no leading space."""
    out = tmp_path / "out"
    flag = "--keep-extra-spaces" if keep else "--no-keep-extra-spaces"
    command = ["prepare", str(txt), "--out", str(out), "--vocab-size", "380", flag, "--quiet"]
    command += ["--model-type", model_type, "--normalization", normalization]
    assert main([*command, "--frameworks", "megatron", "--soft-vocab-limit"]) == 0
    processor = sentencepiece.SentencePieceProcessor(model_file=str(out / "spm.model"))
    for text in (*ODD_LINES, "\n".join(ODD_LINES), "def f():\n    return 1\n\n\nx = 2\n"):
        normalised = processor.normalize(text).replace("\u2581", " ").removeprefix(" ")
        assert processor.decode(processor.encode(text)) == normalised
    assert processor.decode(processor.encode("a\n\nb\n")) == "a\n\nb\n"


def test_special_ids_of_a_trained_model(prepared: Path) -> None:
    """A trained model has fairseq's specials at fairseq's places: offset 0, the same ids."""
    record = manifest.load(prepared)
    assert record.offset == 0
    assert record.ids["specials"] == {"0": 0, "1": 1, "2": 2, "3": 3}


def test_no_eos_is_refused(tmp_path: Path) -> None:
    """A given model that cannot end a document is refused."""
    path = tmp_path / "given.model"
    path.write_bytes(trained(eos_id=-1))
    with pytest.raises(DataError, match="no eos piece"):
        load(path)


def test_lines_skipped_in_training(prepared: Path, txt: Path, tmp_path: Path) -> None:
    """The 6,000-byte line is skipped in training, not in the data; a higher limit trains on it."""
    lines = manifest.load(prepared).tokenizer["lines"]
    assert isinstance(lines, dict) and lines["skipped_too_long"] == 1
    out = tmp_path / "out"
    command = ["prepare", str(txt), "--out", str(out), "--vocab-size", "400", "--quiet"]
    assert main([*command, "--max-sentence-length", "7000"]) == 0
    raised = manifest.load(out).tokenizer["lines"]
    assert raised == {**lines, "skipped_too_long": 0, "usable": lines["usable"] + 1, "used": 388}


def test_settings_name_the_option() -> None:
    """A bad value is reported by its option, with the legal values."""
    with pytest.raises(DataError, match=r"--character-coverage: got 2; legal is 0.98 to 1"):
        TokenizerSettings(character_coverage=2)
    with pytest.raises(DataError, match="--model-type: got 'word'; legal are unigram, bpe"):
        TokenizerSettings(model_type="word")


def test_tokenizer_holds_its_bytes(prepared: Path) -> None:
    """A loaded model keeps the bytes it came from, for the copy in the folder."""
    given = load(prepared / "spm.model")
    assert isinstance(given, Tokenizer)
    assert given.model == (prepared / "spm.model").read_bytes() and given.lines is None
