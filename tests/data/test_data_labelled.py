"""Labelled text: what fairseq's sentence_prediction reads, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from labelled_corpus import write_labelled

from normplugin.cli import main
from normplugin.data import manifest

pytest.importorskip("fairseq")
Refused = Callable[..., str]


@pytest.fixture(scope="module")
def tsv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 400 lines of two classes and one text."""
    return write_labelled(tmp_path_factory.mktemp("labelled"), 400)


@pytest.fixture(scope="module")
def classes(tsv: Path, prepared: Path) -> Path:
    """Return the prepared folder of `tsv`, in the vocabulary of the odd text."""
    return prepare(tsv, prepared)


def prepare(tsv: Path, tokenizer: Path, *options: str) -> Path:
    """Prepare labelled lines beside the file; return the folder."""
    out = tsv.parent / "out"
    command = ["prepare", "--labelled", str(tsv), "--tokenizer", str(tokenizer), "--out", str(out)]
    assert main([*command, "--quiet", *options]) == 0
    return out


def loaded(folder: Path, split: str, classes: int, **options: object) -> tuple:
    """Return fairseq's task and its dataset of a split, in the order of the file."""
    from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

    cfg = SentencePredictionConfig(
        **{
            "data": str(folder / "fairseq"),
            "num_classes": classes,
            "init_token": 0,
            "regression_target": False,
            "no_shuffle": True,
            "seed": 1,
            **options,
        }
    )
    task = SentencePredictionTask.setup_task(cfg)
    return task, task.load_dataset(split)


def rows(path: Path, split: str) -> list[list[str]]:
    """Return the fields of the lines of one split."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for i, line in enumerate(lines) if (i % 20 == 0) == (split == "valid")]


@pytest.mark.parametrize("split", ["train", "valid"])
def test_classes(classes: Path, tsv: Path, prepared: Path, split: str) -> None:
    """fairseq's task reads bos, the text's ids and eos, and class k is the k-th label by letter."""
    task, dataset = loaded(classes, split, 2)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(prepared / "spm.model"))
    wanted = rows(tsv, split)
    assert len(dataset) == len(wanted)
    assert task.label_dictionary.count[4:6] == [200, 180]  # of the training split
    for i, (label, text) in enumerate(wanted):
        found = dataset[i]
        assert found["net_input.src_tokens"].tolist() == [0, *processor.encode(text), 2]
        assert found["target"].tolist() == [("code", "doc").index(label)]
        assert (
            task.label_dictionary[found["target"].item() + task.label_dictionary.nspecial] == label
        )


def test_vocabulary_is_the_pre_trained_one(classes: Path, prepared: Path) -> None:
    """The task's dictionary is the one masked_lm had, mask included: a checkpoint fits."""
    from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask

    task, _ = loaded(classes, "valid", 2)
    before = MaskedLMTask.setup_task(MaskedLMConfig(data=str(prepared / "fairseq")))
    assert task.source_dictionary == before.source_dictionary
    assert task.source_dictionary.symbols == before.source_dictionary.symbols


def test_equals_fairseq_preprocess(classes: Path, tsv: Path, tmp_path: Path) -> None:
    """fairseq-preprocess on labels and on pieces, with our dictionaries, writes our files."""
    from fairseq import options
    from fairseq_cli import preprocess

    processor = sentencepiece.SentencePieceProcessor(model_file=str(classes / "spm.model"))
    for column, name in enumerate(("label", "input0")):
        arguments = ["--only-source", "--destdir", str(tmp_path / name), "--workers", "1"]
        for split in ("train", "valid"):
            texts = [row[column] for row in rows(tsv, split)]
            if column:
                texts = [" ".join(processor.encode_as_pieces(text)) for text in texts]
            (tmp_path / f"{split}.{name}").write_text("\n".join(texts) + "\n", encoding="utf-8")
            arguments += [f"--{split}pref", str(tmp_path / f"{split}.{name}")]
        arguments += ["--srcdict", str(classes / "fairseq" / name / "dict.txt")]
        preprocess.main(options.get_preprocessing_parser().parse_args(arguments))
        for path in (classes / "fairseq" / name).iterdir():
            assert path.read_bytes() == (tmp_path / name / path.name).read_bytes(), path


def test_two_texts(prepared: Path, tmp_path: Path) -> None:
    """The second text follows the first after its eos and the separator."""
    tsv = write_labelled(tmp_path, 60, columns=2)
    _, dataset = loaded(prepare(tsv, prepared), "train", 2, separator_token=2)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(prepared / "spm.model"))
    for i, (_, *texts) in enumerate(rows(tsv, "train")):
        first, second = map(processor.encode, texts)
        assert dataset[i]["net_input.src_tokens"].tolist() == [0, *first, 2, 2, *second, 2]
    counts = manifest.load(tmp_path / "out").splits
    assert sum(count.bytes for count in counts.values()) == tsv.stat().st_size


def test_regression(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --regression the targets are the numbers in the file."""
    tsv = write_labelled(tmp_path, 60, scores=True)
    out = prepare(tsv, prepared, "--regression")
    for split in ("train", "valid"):
        _, dataset = loaded(out, split, 1, regression_target=True)
        found = [dataset[i]["target"] for i in range(len(dataset))]
        assert found == [[float(label)] for label, _ in rows(tsv, split)]
    command = ["prepare", "--labelled", str(tsv), "--tokenizer", str(prepared), "--regression"]
    assert main([*command, "--out", str(out)]) == 0
    assert "--num-classes 1 --regression-target" in capsys.readouterr().out


def test_numbers_are_classes_in_order(prepared: Path, tmp_path: Path) -> None:
    """Labels 0 to 11 are classes 0 to 11: ordered by value, not by letter."""
    tsv = tmp_path / "t.tsv"
    tsv.write_text("".join(f"{i % 12}\ttext number {i}\n" for i in range(240)))
    out = prepare(tsv, prepared)
    _, dataset = loaded(out, "train", 12)
    assert [dataset[i]["target"].item() for i in range(len(dataset))] == [
        int(label) for label, _ in rows(tsv, "train")
    ]
    found = manifest.load(out).corpus["classes"]
    assert isinstance(found, list) and found[10] == {"label": "10", "train": 20, "valid": 0}


def test_same_again(
    classes: Path, tsv: Path, prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command finds the result; a model file of the same bytes is the same tokenizer."""
    command = ["prepare", "--labelled", str(tsv), "--out", str(classes), "--tokenizer"]
    for tokenizer in (prepared, prepared / "spm.model"):
        assert main([*command, str(tokenizer)]) == 0
        printed = capsys.readouterr().out
        assert "already prepared" in printed and "classes (training lines): 0 code (" in printed
        assert "--task sentence_prediction" in printed and "--num-classes 2" in printed
    assert main([*command, str(prepared), "--regression"]) == 2
    assert "labelled.tsv, line 1: got label 'doc'" in capsys.readouterr().err


GOOD = "a\tone\nb\ttwo\n" * 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "a\n", "line 61: got 1 fields; legal is 2 as in the first line"),
        (GOOD + "\n", "line 61: got 1 fields"),
        (GOOD + "a\tone\ttwo\n", "line 61: got 3 fields"),
        ("a\n" + GOOD, "line 1: got 1 fields; legal is label<TAB>text"),
        ("a\tb\tc\td\n" + GOOD, "line 1: got 4 fields; legal is label<TAB>text"),
        (GOOD + "a\t \n", "line 61: got an empty text"),
        (GOOD + "\tone\n", "line 61: got an empty label"),
        (GOOD.replace("\n", "\tx\n") + "a\tone\t\n", "line 61: got an empty second text"),
        (GOOD + "a b\tone\n", "line 61: got label 'a b'; legal is one word"),
        (GOOD + "<pad>\tone\n", "line 61: got label '<pad>'; legal is one word, and none of"),
        ("aa\tone\n" + GOOD, "line 1, label: got 'aa'; legal are a, b. Did you mean 'a'"),
        ("a\tone\n", "train split: got 0 documents"),
    ],
)
def test_lines_refused(
    refused: Refused, prepared: Path, tmp_path: Path, text: str, message: str
) -> None:
    """A line of no use is one sentence with its file and number; nothing is left behind."""
    (tmp_path / "t.tsv").write_text(text)
    error = refused("--labelled", tmp_path / "t.tsv", "--tokenizer", prepared)
    assert message in error and error.count("\n") == 1
    if "line" in message.split(":")[0]:
        assert f"{tmp_path / 't.tsv'}, line" in error


@pytest.mark.parametrize("label", ["high", "nan", "inf", "1 2"])
def test_scores_refused(refused: Refused, prepared: Path, tmp_path: Path, label: str) -> None:
    """With --regression a label that is no finite number is refused."""
    (tmp_path / "t.tsv").write_text(f"1\ta\n{label}\tb\n")
    error = refused("--labelled", tmp_path / "t.tsv", "--tokenizer", prepared, "--regression")
    assert f"line 2: got label '{label}'; legal with --regression is a finite number" in error


def test_validation_labels(refused: Refused, prepared: Path, tmp_path: Path) -> None:
    """A label that only --valid has is named with the file, the line and those in training."""
    for name, text in (("t.tsv", GOOD), ("v.tsv", "a\tone\nc\tthree\n")):
        (tmp_path / name).write_text(text)
    files = ["--labelled", tmp_path / "t.tsv", "--valid", tmp_path / "v.tsv"]
    error = refused(*files, "--tokenizer", prepared)
    assert re.search(r"v\.tsv, line 2, label: got 'c'; legal are a, b", error)


def test_options_refused(refused: Refused, tsv: Path, txt: Path, prepared: Path) -> None:
    """A mix of options that makes no labelled data is one sentence."""
    labelled = ["--labelled", tsv]
    for arguments, message in (
        (labelled, "--labelled: got .* without --tokenizer; the vocabulary must be"),
        ([txt, "--regression"], "--regression: got True without --labelled"),
        ([txt, *labelled, "--tokenizer", prepared], "with INPUT"),
        ([*labelled, "--tokenizer", prepared, "--document", "line"], "with --document line"),
        ([*labelled, "--tokenizer", prepared, "--frameworks", "megatron"], "legal are fairseq"),
        ([*labelled, "--tokenizer", tsv.parent], "it has no manifest.json"),
        (["--labelled", "nowhere", "--tokenizer", prepared], "--labelled: got nowhere; there is"),
    ):
        error = refused(*arguments)
        assert re.search(message, error) and error.count("\n") == 1, error


def test_damaged_vocabulary(refused: Refused, tsv: Path, classes: Path, tmp_path: Path) -> None:
    """A prepared folder whose dictionary changed is not taken for the pre-trained vocabulary."""
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(classes, copy)
    (copy / "fairseq" / "input0" / "dict.txt").write_text("a 1\n")
    error = refused("--labelled", tsv, "--tokenizer", copy)
    assert "dict.txt; the manifest says" in error
