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
QUICK = ("--vocab-size", "340", "--quiet")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two German files and their translation into capitals, with gaps."""
    folder = tmp_path_factory.mktemp("pairs")
    source = plain_lines(400)
    target = [line.upper() for line in source]
    source[5] = source[9] = target[9] = ""
    target[7] = " \t"
    for name, lines in zip(SIDES, (source, target), strict=True):
        (folder / f"a.{name}").write_text("\n".join(lines[:133]) + "\n", encoding="utf-8")
        (folder / f"b.{name}").write_text("\n".join(lines[133:]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def pairs(texts: Path) -> Path:
    """Return the prepared folder of `texts`."""
    assert main(["prepare", *files(texts), "--out", str(texts / "out"), *QUICK]) == 0
    return texts / "out"


def files(folder: Path) -> list[str]:
    """Return the options that name the files."""
    source, target = ([str(folder / f"{file}.{name}") for file in "ab"] for name in SIDES)
    return ["--source", *source, "--target", *target]


def wanted(texts: Path) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of each split, the slow and obvious way."""
    sides = [
        "".join((texts / f"{file}.{name}").read_text() for file in "ab").split("\n")
        for name in SIDES
    ]
    kept = [pair for pair in zip(*sides, strict=True) if all(text.strip() for text in pair)]
    return {"train": [pair for i, pair in enumerate(kept) if i % 20], "valid": kept[::20]}


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
    for split, rows in wanted(texts).items():
        sides = [processor.decode(items(pairs, split, name)) for name in SIDES]
        assert list(zip(*sides, strict=True)) == rows


def test_equals_fairseq_preprocess(pairs: Path, texts: Path, tmp_path: Path) -> None:
    """fairseq-preprocess on the pieces, with our dictionary, writes our files to the byte."""
    from fairseq import options
    from fairseq_cli import preprocess

    processor = sentencepiece.SentencePieceProcessor(model_file=str(pairs / "spm.model"))
    counts = Counter[str]()
    for split, rows in wanted(texts).items():
        for side, name in enumerate(SIDES):
            pieces = [processor.encode_as_pieces(row[side]) for row in rows]
            (tmp_path / f"{split}.{name}").write_text("\n".join(map(" ".join, pieces)) + "\n")
            counts.update(piece for line in pieces for piece in line if split == "train")
    arguments = ["-s", "de", "-t", "en", "--joined-dictionary", "--destdir", str(tmp_path / "d")]
    arguments += ["--srcdict", str(pairs / "fairseq" / "dict.de.txt"), "--workers", "1"]
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
    command += ["--valid-source", str(texts / "a.de"), "--valid-target", str(texts / "a.en")]
    assert main([*command, "--source-lang", "low", "--target-lang", "high"]) == 0
    record = manifest.load(tmp_path / "o")
    found = {name: counts.documents for name, counts in record.splits.items()}
    assert found == {
        **{f"train.low-high.{name}": 397 for name in ("low", "high")},
        **{f"valid.low-high.{name}": 130 for name in ("low", "high")},
    }
    assert str(texts) not in json.dumps(record.settings) + json.dumps(record.corpus)


@pytest.mark.parametrize(
    ("source", "target", "given", "names"),
    [
        ("a.de", "a.en", (None, None), ("de", "en")),
        ("a.de", "a.en", (None, "fr"), ("de", "fr")),
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
    source, target = files(texts)[:3], files(texts)[3:]
    for arguments, message in (
        (source, "--source: got .*a.de without --target; pairs have two sides"),
        (target, "--target: got .*a.en without --source"),
        ([*source, *target, "--valid-source", short], "without --valid-target"),
        (["--valid-source", short, "--valid-target", short], "without --source"),
        (["--source-lang", "de", txt], "--source-lang: got de without --source"),
        ([txt, *source, *target], "--source: got .* with INPUT .*; a folder holds pairs or"),
        ([*source, *target, "--valid", short], "pairs take --valid-source"),
        ([*source, *target, "--document", "file"], "with --document file"),
        ([*source, *target, "--frameworks", "megatron"], "got 'megatron'; legal are fairseq"),
        (
            [*source, target[0], target[1], short],
            r"short\.en: got 1, and 267 lines in .*b\.de; line i",
        ),
        ([*source, *target, short], "--target: got 3, and 2 files"),
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
    source, target = ((data / f"train.src-tgt.{name}.bin").read_bytes() for name in ("src", "tgt"))
    assert source == target
    assert manifest.load(tmp_path / "o").corpus["pairs"] == 2000
