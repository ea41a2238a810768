"""Documents, splits, streaming, determinism, units."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_text import plain_lines

import normplugin
from normplugin.cli import main
from normplugin.data import encode, manifest, units, vocabulary
from normplugin.data.corpus import Document, text_corpus
from normplugin.data.default_corpus import default_corpus, split_of
from normplugin.data.tokenizer import load
from normplugin.errors import DataError


def documents(path: Path, kind: str, **options: object) -> list[Document]:
    """Return the documents of one file."""
    return list(text_corpus((path,), (), kind, 0.5, "strict").documents())


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("line", ["a", "b  ", "", "", "c", "d"]),
        ("blank-line", ["a\r\nb  ", "c\nd"]),
        ("file", ["a\r\nb  \n\n \nc\nd"]),
    ],
)
def test_documents(kind: str, texts: list[str], tmp_path: Path) -> None:
    """A document is a line, lines up to a blank one, or a file; each byte counts once."""
    path = tmp_path / "t"
    path.write_bytes(b"a\r\nb  \n\n \nc\nd")
    found = documents(path, kind)
    assert [document.text if document.text.strip() else "" for document in found] == texts
    assert sum(document.raw_bytes for document in found) == path.stat().st_size


def test_split_by_document(tmp_path: Path) -> None:
    """Without --valid every 1/fraction-th document is validation, from the first on."""
    path = tmp_path / "t"
    path.write_text("a\n\nb\nc\nd\n")
    found = [(d.text, d.split) for d in documents(path, "line") if d.text]
    assert found == [("a", "valid"), ("b", "train"), ("c", "valid"), ("d", "train")]


def test_valid_files(tmp_path: Path) -> None:
    """With --valid the splits are the files."""
    paths = tmp_path / "a", tmp_path / "b"
    for path in paths:
        path.write_text(f"{path.name}1\n{path.name}2\n")
    corpus = text_corpus(paths[:1], paths[1:], "line", 0.05, "strict")
    found = [(document.text, document.split) for document in corpus.documents()]
    assert found == [("a1", "train"), ("a2", "train"), ("b1", "valid"), ("b2", "valid")]


def test_default_corpus() -> None:
    """The standard library: 8 to 20 MB, split by file, the same each time, without tests."""
    corpus = default_corpus("file")
    names = [source.name for source in corpus.sources]
    assert names == sorted(set(names)) and corpus == default_corpus("file")
    assert not any("test" in name.split("/")[:-1] or "site-packages" in name for name in names)
    assert 8e6 < corpus.fingerprint().bytes < 20e6
    share = sum(source.split == "valid" for source in corpus.sources) / len(names)
    assert 0.02 < share < 0.1
    assert all(source.split == split_of(source.name) for source in corpus.sources)


def test_default_corpus_of_a_bare_python(tmp_path: Path) -> None:
    """A Python without its sources is told so."""
    with pytest.raises(DataError, match="default corpus: got 0 sources"):
        default_corpus("file", tmp_path)


class Counting:
    """A writer that only counts."""

    def __init__(self) -> None:
        self.documents = 0

    def add(self, ids: object, lengths: object) -> None:
        """Count documents."""
        self.documents += len(lengths)  # type: ignore[arg-type]

    def close(self) -> None:
        """Do nothing."""


def test_streaming(prepared: Path) -> None:
    """However long the corpus, at most two batches of documents are alive at a time."""
    alive = peak = 0

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def corpus() -> Iterator[Document]:
        nonlocal alive, peak
        for i in range(6 * encode.BATCH_DOCUMENTS):
            split = "valid" if i % 20 == 0 else "train"
            document = Document(split, split, f"norm {i}", 10)
            weakref.finalize(document, gone)
            alive += 1
            peak = max(peak, alive)
            yield document

    tokenizer = load(prepared / "spm.model")
    ids = vocabulary.build(tokenizer.processor)
    writers = {"train": [Counting()], "valid": [Counting()]}
    result = encode.encode(corpus(), tokenizer, ids, writers)
    assert peak <= 2 * encode.BATCH_DOCUMENTS + 2
    assert result.splits["train"].documents == writers["train"][0].documents
    assert sum(counts.documents for counts in result.splits.values()) == 6 * encode.BATCH_DOCUMENTS


def test_batches_are_bounded_by_bytes() -> None:
    """A batch stays under the byte limit, but for a document that is longer by itself."""
    sizes = [encode.BATCH_BYTES // 2, encode.BATCH_BYTES // 3, encode.BATCH_BYTES * 3, 1]
    found = list(encode.batches(Document("train", "train", "x", size) for size in sizes))
    assert [[document.raw_bytes for document in batch] for batch in found] == [
        sizes[:2],
        sizes[2:3],
        sizes[3:],
    ]


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_two_runs_are_equal(model_type: str, tmp_path: Path) -> None:
    """Two runs write the same bytes, manifest included, and no path is in them."""
    pytest.importorskip("fairseq")
    pytest.importorskip("megatron.core")
    command = ["prepare", write_text(tmp_path), "--vocab-size", "400", "--model-type", model_type]
    command += ["--input-sentence-size", "500", "--quiet"]
    for name in ("one", "two"):
        assert main([*command, "--out", str(tmp_path / name)]) == 0
    assert manifest.hashes(tmp_path / "one") == manifest.hashes(tmp_path / "two")
    assert str(tmp_path) not in (tmp_path / "one" / "manifest.json").read_text()


def test_two_processes_are_equal(tmp_path: Path) -> None:
    """The command in a process of its own, from another folder, writes the same bytes."""
    pytest.importorskip("megatron.core")
    command = ["prepare", write_text(tmp_path), "--vocab-size", "400", "--frameworks", "megatron"]
    assert main([*command, "--quiet", "--out", str(tmp_path / "one")]) == 0
    environment = {**os.environ, "PYTHONPATH": str(Path(normplugin.__file__).parents[1])}
    command = [sys.executable, "-m", "normplugin", *command, "--out", "two"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, env=environment)
    assert manifest.hashes(tmp_path / "one") == manifest.hashes(tmp_path / "two")


def write_text(folder: Path) -> str:
    """Write 3,000 lines and return the path."""
    (folder / "t").write_text("\n".join(plain_lines(3000)))
    return str(folder / "t")


def test_command_imports_no_framework() -> None:
    """Importing the command loads neither torch nor a framework."""
    code = "import sys, normplugin.data.command, normplugin.data.prepare, normplugin.data.units\n"
    code += "print([m for m in ('torch', 'fairseq', 'megatron') if m in sys.modules])"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert found.strip() == "[]"


def test_summary(txt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The summary has the counts, the skipped line, the files and the next commands."""
    pytest.importorskip("fairseq")
    pytest.importorskip("megatron.core")
    out = tmp_path / "out"
    assert main(["prepare", str(txt), "--out", str(out), "--vocab-size", "330"]) == 0
    found = capsys.readouterr().out
    tokens = manifest.load(out).splits["train"].tokens
    for part in (f"{tokens:,}", "1 skipped as too long", "--task masked_lm", "spm.model"):
        assert part in found
    assert f"--valid-data-path {out}/megatron/valid_text_document" in found


def test_manifest_errors(tmp_path: Path) -> None:
    """No manifest, or one of another format, is told apart."""
    with pytest.raises(DataError, match=r"it has no manifest\.json"):
        manifest.load(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="no manifest of format 1"):
        manifest.load(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="it cannot be read"):
        manifest.load(tmp_path)


@pytest.mark.parametrize(("v", "t", "w", "b"), [(400, 1000, 300, 1800), (8000, 7, 5, 31)])
def test_units_of_a_uniform_model(v: int, t: int, w: int, b: int) -> None:
    """All logits 0: per token V, per word V^(T/W), T log2(V) / B bits per byte."""
    found = units.from_nats(t * math.log(v), t, w, b)
    assert found.token_perplexity == pytest.approx(v, rel=1e-6)
    assert found.word_perplexity == pytest.approx(v ** (t / w), rel=1e-6)
    assert found.bits_per_byte == pytest.approx(t * math.log2(v) / b, rel=1e-6)


def test_units_edges() -> None:
    """A count of 0 is refused, and a perplexity beyond floats is infinite."""
    with pytest.raises(DataError, match="words: got 0; legal is 1 or more"):
        units.from_nats(1.0, 1, 0, 1)
    assert units.from_nats(1e6, 1, 1, 1).word_perplexity == math.inf
