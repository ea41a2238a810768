"""Translation pairs: what fairseq reads, what is left out, what is refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from data_text import plain_lines
from parallel_corpus import short_lines, write_parallel

from normplugin.cli import main
from normplugin.data import manifest
from normplugin.data.parallel import languages
from normplugin.errors import DataError

pytest.importorskip("fairseq")
Refused = Callable[..., str]
SIDES = ("de", "en")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with train.de and train.en, its translation into capitals, with gaps."""
    folder = tmp_path_factory.mktemp("pairs")
    source = plain_lines(400)
    target = [line.upper() for line in source]
    source[5] = source[9] = target[9] = ""
    target[7] = " \t"
    for name, lines in zip(SIDES, (source, target), strict=True):
        (folder / f"train.{name}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def pairs(texts: Path) -> Path:
    """Return the prepared folder of `texts`."""
    assert main(["prepare", *files(texts), "--out", str(texts / "out"), *QUICK]) == 0
    return texts / "out"


QUICK = ("--vocab-size", "340", "--quiet")


def files(folder: Path) -> list[str]:
    """Return the options that name the files."""
    return ["--source", str(folder / "train.de"), "--target", str(folder / "train.en")]


def kept(texts: Path) -> list[tuple[str, str]]:
    """Return the pairs without a blank side, the slow and obvious way."""
    sides = [(texts / f"train.{name}").read_text().split("\n")[:-1] for name in SIDES]
    return [pair for pair in zip(*sides, strict=True) if all(text.strip() for text in pair)]


def items(folder: Path, split: str, name: str) -> list[list[int]]:
    """Return the items of one side, by fairseq's loader."""
    from fairseq.data import Dictionary, data_utils

    dictionary = Dictionary.load(str(folder / "fairseq" / f"dict.{name}.txt"))
    path = str(folder / "fairseq" / f"{split}.de-en.{name}")
    dataset = data_utils.load_indexed_dataset(path, dictionary)
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_lines_stay_together(pairs: Path, texts: Path) -> None:
    """Item i of either side is line i of the pairs that are kept; every 20th is validation."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(pairs / "spm.model"))
    wanted = kept(texts)
    for split in ("train", "valid"):
        sides = [processor.decode(items(pairs, split, name)) for name in SIDES]
        found = list(zip(*sides, strict=True))
        assert found == [
            pair for i, pair in enumerate(wanted) if (i % 20 == 0) == (split == "valid")
        ]


def test_equals_fairseq_preprocess(pairs: Path, texts: Path, tmp_path: Path) -> None:
    """fairseq-preprocess on the pieces, with our dictionary, writes our files to the byte."""
    from fairseq import options
    from fairseq_cli import preprocess

    processor = sentencepiece.SentencePieceProcessor(model_file=str(pairs / "spm.model"))
    wanted, counts = kept(texts), Counter[str]()
    for split, rows in (
        ("valid", wanted[::20]),
        ("train", [p for i, p in enumerate(wanted) if i % 20]),
    ):
        for side, name in enumerate(SIDES):
            pieces = [processor.encode_as_pieces(row[side]) for row in rows]
            (tmp_path / f"{split}.{name}").write_text("\n".join(map(" ".join, pieces)) + "\n")
            counts.update(piece for line in pieces for piece in line if split == "train")
    arguments = ["-s", "de", "-t", "en", "--joined-dictionary", "--workers", "1"]
    arguments += [
        "--srcdict",
        str(pairs / "fairseq" / "dict.de.txt"),
        "--destdir",
        str(tmp_path / "d"),
    ]
    for split in ("train", "valid"):
        arguments += [f"--{split}pref", str(tmp_path / split)]
    preprocess.main(options.get_preprocessing_parser().parse_args(arguments))
    ours = {path.name: path.read_bytes() for path in (pairs / "fairseq").iterdir()}
    assert len(ours) == 10 and ours == {name: (tmp_path / "d" / name).read_bytes() for name in ours}
    rows = [row.rsplit(" ", 1) for row in ours["dict.de.txt"].decode().splitlines()]
    assert {piece: int(count) for piece, count in rows if int(count)} == counts


def test_translation_task(pairs: Path) -> None:
    """fairseq's task finds the languages, one dictionary for both, and aligned pairs."""
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    data = str(pairs / "fairseq")
    cfg = TranslationConfig(data=data, dataset_impl=None, required_seq_len_multiple=1)
    task = TranslationTask.setup_task(cfg)
    assert (task.cfg.source_lang, task.cfg.target_lang) == SIDES
    assert task.source_dictionary == task.target_dictionary and len(task.source_dictionary) == 340
    task.load_dataset("train")
    dataset = task.dataset("train")
    for i in (0, len(dataset) - 1):
        found = dataset[i]["source"].tolist(), dataset[i]["target"].tolist()
        assert found == tuple(items(pairs, "train", name)[i] for name in SIDES)


def test_record(pairs: Path, capsys: pytest.CaptureFixture[str], texts: Path) -> None:
    """The manifest and the summary count pairs and, by reason, those left out."""
    record = manifest.verify(pairs)
    skipped = {"source empty": 1, "target empty": 1, "both empty": 1}
    assert record.corpus["pairs"] == 397 and record.corpus["skipped"] == skipped
    assert {name: counts.documents for name, counts in record.splits.items()} == {
        **{f"train.de-en.{name}": 377 for name in SIDES},
        **{f"valid.de-en.{name}": 20 for name in SIDES},
    }
    assert sum(counts.bytes for counts in record.splits.values()) == record.corpus["bytes"]
    assert main(["prepare", *files(texts), "--out", str(pairs), *QUICK[:2]]) == 0
    printed = capsys.readouterr().out
    assert "already prepared" in printed and "pairs: 397, 1 left out for both empty" in printed
    assert "--task translation --source-lang de --target-lang en --share-all-embeddings" in printed


def test_tokenizer_sees_both_sides(texts: Path, tmp_path: Path) -> None:
    """However sparse the sample, the vocabulary has pieces of both languages."""
    command = ["prepare", *files(texts), "--out", str(tmp_path / "o"), "--quiet"]
    assert main([*command, "--input-sentence-size", "377", "--soft-vocab-limit"]) == 0
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "o" / "spm.model"))
    pieces = {processor.id_to_piece(i) for i in range(processor.get_piece_size())}
    assert set("aemr") < pieces and set("AEMR") < pieces


def test_valid_files_and_names(texts: Path, tmp_path: Path) -> None:
    """With validation files the splits are the files; languages can be named; no path is kept."""
    command = ["prepare", *files(texts), "--out", str(tmp_path / "o"), *QUICK]
    command += [
        "--valid-source",
        str(texts / "train.de"),
        "--valid-target",
        str(texts / "train.en"),
    ]
    assert main([*command, "--source-lang", "low", "--target-lang", "high"]) == 0
    record = manifest.load(tmp_path / "o")
    for split in ("train", "valid"):
        for name in ("low", "high"):
            assert record.splits[f"{split}.low-high.{name}"].documents == 397
    assert str(texts) not in json.dumps(record.settings) + json.dumps(record.corpus)


@pytest.mark.parametrize(
    ("source", "target", "given", "names"),
    [
        ("train.de", "train.en", (None, None), ("de", "en")),
        ("train.de", "train.en", (None, "fr"), ("de", "fr")),
        ("source.txt", "target.txt", (None, None), ("src", "tgt")),
        ("source", "target", ("a", None), ("a", "tgt")),
    ],
)
def test_languages(
    source: str, target: str, given: tuple[str | None, str | None], names: tuple
) -> None:
    """Languages are called as told, else by the files' suffixes, else src and tgt."""
    assert languages([Path(source)], [Path(target)], given) == names
    with pytest.raises(DataError, match="--target-lang: got x for both languages"):
        languages([Path(source)], [Path(target)], ("x", "x"))
    with pytest.raises(DataError, match=r"--source-lang: got 'zh-cn'; legal are letters"):
        languages([Path("t.zh-cn")], [Path("t.en")], (None, None))


def test_refusals(refused: Refused, texts: Path, txt: Path, tmp_path: Path) -> None:
    """Every mix that makes no pairs is one sentence, and leaves nothing behind."""
    short = tmp_path / "short.en"
    short.write_text("one\n")
    source, target = files(texts)[:2], files(texts)[2:]
    for arguments, message in (
        (source, "--source: got .*train.de without --target; pairs have two sides"),
        (target, "--target: got .*train.en without --source"),
        ([*source, *target, "--valid-source", short], "without --valid-target"),
        (["--valid-source", short, "--valid-target", short], "without --source"),
        (["--source-lang", "de", txt], "--source-lang: got de without --source"),
        ([txt, *source, *target], "--source: got .* with INPUT .*; a folder holds pairs or"),
        ([*source, *target, "--valid", short], "pairs take --valid-source"),
        ([*source, *target, "--document", "file"], "with --document file"),
        ([*source, *target, "--frameworks", "megatron"], "got 'megatron'; legal are fairseq"),
        ([*source, "--target", short], "got 1 lines in the second and 400 in the first"),
        ([*source, *target, short], "--target: got 2 files and 1 files"),
        ([*source, "--target", "nowhere"], "--target: got nowhere; there is no such file"),
    ):
        error = refused(*arguments)
        assert error.count("\n") == 1
        assert re.search(message, error), error


def test_folder_of_something_else(
    refused: Refused, pairs: Path, prepared: Path, texts: Path, txt: Path
) -> None:
    """A folder of text is not replaced by pairs, nor one of pairs by text or other languages."""
    assert "prepared with other" in refused(*files(texts), *QUICK, out=prepared)
    assert "prepared with other" in refused(txt, *QUICK, out=pairs)
    other = refused(*files(texts), *QUICK, "--target-lang", "fr", out=pairs)
    assert "prepared with other languages" in other


def test_copy_task(tmp_path: Path) -> None:
    """The copy task of the default corpus: thousands of pairs, the same ids on both sides."""
    options = write_parallel(tmp_path, short_lines(2000))
    command = ["prepare", *options, "--out", str(tmp_path / "o"), "--vocab-size", "800", "--quiet"]
    assert main(command) == 0
    data = tmp_path / "o" / "fairseq"
    assert (data / "train.src-tgt.src.bin").read_bytes() == (
        data / "train.src-tgt.tgt.bin"
    ).read_bytes()
    assert manifest.load(tmp_path / "o").corpus["pairs"] == 2000
