"""What prepare refuses, and that it leaves nothing behind."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from data_text import plain_lines

from normplugin.cli import main
from normplugin.data import frameworks, manifest
from normplugin.data.prepare import prepare
from normplugin.data.settings import PrepareSettings, TokenizerSettings
from normplugin.errors import DataError, MissingFrameworkError

pytest.importorskip("fairseq")
pytest.importorskip("megatron.core")
Refused = Callable[..., str]


def written(path: Path, text: str | bytes) -> Path:
    """Write a file and return its path."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_missing_file(refused: Refused, tmp_path: Path) -> None:
    """A missing INPUT is named."""
    assert "INPUT: got nowhere; there is no such file" in refused("nowhere")


def test_folder(refused: Refused, tmp_path: Path) -> None:
    """A folder is no INPUT."""
    assert "legal is a file of UTF-8 text" in refused(tmp_path)


def test_empty_file(refused: Refused, tmp_path: Path) -> None:
    """An empty INPUT is refused."""
    assert "the file is empty" in refused(written(tmp_path / "t", ""))


@pytest.mark.parametrize("text", ["\n \n\t\n", "one line only\n"])
def test_empty_split(refused: Refused, tmp_path: Path, text: str) -> None:
    """A split without a document that is not blank is refused, with what to do."""
    assert "split: got 0 documents" in refused(written(tmp_path / "t", text))


def test_undecodable_bytes(refused: Refused, tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are reported by file, line and offset; replacing is an option."""
    path = written(tmp_path / "t", b"good\nba\xffd\n" + "\n".join(plain_lines(200)).encode())
    assert f"{path}, line 2: got byte 0xff at offset 7" in refused(path)
    arguments = [str(path), "--out", str(tmp_path / "new"), "--vocab-size", "330", "--quiet"]
    assert main(["prepare", *arguments, "--errors", "replace"]) == 0
    splits = manifest.load(tmp_path / "new").splits
    assert sum(counts.bytes for counts in splits.values()) == path.stat().st_size


def test_vocabulary_too_large(refused: Refused, txt: Path, tmp_path: Path) -> None:
    """The message has the possible maximum, which works; the soft limit takes what there is."""
    message = refused(txt, "--vocab-size", 32000, "--quiet")
    assert message.count("\n") == 1 and "--soft-vocab-limit" in message
    maximum = message.split("at most ")[1].split(".")[0]
    for name, arguments in (("max", [maximum]), ("soft", ["32000", "--soft-vocab-limit"])):
        out = tmp_path / name
        command = ["prepare", str(txt), "--out", str(out), "--quiet", "--vocab-size", *arguments]
        assert main(command) == 0
        assert manifest.load(out).tokenizer["pieces"] == int(maximum)


def test_vocabulary_too_small(refused: Refused, txt: Path) -> None:
    """The message has the size that is needed."""
    assert "need at least" in refused(txt, "--vocab-size", 100)


def test_unknown_rate(refused: Refused, tmp_path: Path) -> None:
    """Unknown tokens over the limit are refused without byte fallback, and are 0 with it."""
    lines = [f"{line} {chr(0x1F300 + i)}" for i, line in enumerate(plain_lines(300))]
    path = written(tmp_path / "t", "\n".join(lines))
    options = ["--character-coverage", "0.98", "--vocab-size", "400", "--soft-vocab-limit"]
    message = refused(path, *options, "--no-byte-fallback", "--quiet")
    assert "unknown tokens: got" in message and "--byte-fallback" in message
    rates = []
    for extra in (["--no-byte-fallback", "--max-unk-rate", "1"], []):
        out = tmp_path / f"new{len(rates)}"
        assert main(["prepare", str(path), "--out", str(out), *options, *extra, "--quiet"]) == 0
        rates.append(manifest.load(out).splits["train"].unk_rate)
    assert rates[0] > 0.01 and rates[1] == 0.0


def test_foreign_folder(refused: Refused, txt: Path, tmp_path: Path) -> None:
    """A folder with anything else in it is refused, --overwrite or not."""
    out = tmp_path / "mine"
    out.mkdir()
    written(out / "thesis.tex", "precious")
    for extra in ([], ["--overwrite"]):
        assert "it holds something else" in refused(txt, *extra, out=out)
    assert "it is not a folder" in refused(txt, out=txt)


def test_same_again_and_other_settings(
    refused: Refused, txt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command finds the result; another is refused; --overwrite replaces it."""
    out = tmp_path / "out"
    command = ["prepare", str(txt), "--out", str(out), "--vocab-size", "330"]
    assert main(command) == 0
    assert "already prepared" not in capsys.readouterr().out
    inode = (out / "manifest.json").stat().st_ino
    assert main(command) == 0
    assert "already prepared" in capsys.readouterr().out
    assert (out / "manifest.json").stat().st_ino == inode
    message = refused(txt, "--vocab-size", 340)
    assert "prepared with other tokenizer" in message
    assert main([*command[:-1], "340", "--overwrite", "--quiet"]) == 0
    assert manifest.verify(out).tokenizer["pieces"] == 340


def test_damaged_result(refused: Refused, txt: Path, tmp_path: Path) -> None:
    """A result whose files changed is reported by file, not taken for good."""
    out = tmp_path / "out"
    command = ["prepare", str(txt), "--out", str(out), "--vocab-size", "330", "--quiet"]
    assert main(command) == 0
    written(out / "fairseq" / "dict.txt", "damaged 1\n")
    assert "dict.txt; the manifest says" in refused(*command[1:2], *command[4:])
    assert main([*command, "--overwrite"]) == 0
    manifest.verify(out)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_failure_while_writing(
    error: BaseException, txt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or an interrupt in the middle leaves neither DIR nor anything beside it."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(manifest.Manifest, "write", fail)
    tokenizer = TokenizerSettings(vocab_size=330)
    settings = PrepareSettings(out=tmp_path / "out", inputs=(txt,), tokenizer=tokenizer)
    full = isinstance(error, OSError)
    with pytest.raises(
        DataError if full else KeyboardInterrupt, match="No space" if full else None
    ):
        prepare(settings)
    assert not list(tmp_path.iterdir())


def test_full_disk(txt: Path) -> None:
    """A real write error of a framework's builder becomes one message."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    from normplugin.data.output import staged

    with (
        pytest.raises(DataError, match="No space left on device"),
        staged(txt.parent / "full") as folder,
    ):
        (folder / "train.bin").symlink_to("/dev/full")
        (folder / "train.bin").write_bytes(b"x" * 100_000)
    assert not (txt.parent / "full").exists()


def test_text_that_changes(txt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that grows between the passes is refused: its hash would be wrong."""
    path = written(tmp_path / "t", txt.read_bytes())
    train = prepare.__globals__["_train"]

    def growing(*arguments: object) -> object:
        written(path, txt.read_bytes() * 2)
        return train(*arguments)

    monkeypatch.setitem(prepare.__globals__, "_train", growing)
    tokenizer = TokenizerSettings(vocab_size=330)
    settings = PrepareSettings(out=tmp_path / "out", inputs=(path,), tokenizer=tokenizer)
    with pytest.raises(DataError, match="a file changed on the way"):
        prepare(settings)


def test_missing_framework(refused: Refused, txt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An absent framework that was asked for is named with its pip extra."""
    monkeypatch.setattr(frameworks, "_PROBES", {"fairseq": "fairseq_nope", "megatron": "megatron"})
    assert "Install normplugin[fairseq]" in refused(txt, "--frameworks", "fairseq")
    with pytest.raises(MissingFrameworkError, match="neither fairseq nor Megatron-Core"):
        frameworks.require(())
    with pytest.raises(MissingFrameworkError, match="importing megatron_nope failed"):
        frameworks.imported("megatron", "megatron_nope")


@pytest.mark.parametrize(("absent", "present"), [("fairseq", "megatron"), ("megatron", "fairseq")])
def test_one_framework_is_enough(
    absent: str, present: str, txt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being asked, prepare writes for the framework that is installed."""
    monkeypatch.setattr(frameworks, "_PROBES", {absent: f"{absent}_nope", present: present})
    out = tmp_path / "one"
    assert main(["prepare", str(txt), "--out", str(out), "--vocab-size", "330", "--quiet"]) == 0
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["manifest.json", present, "spm.model"]
    )


def test_clashing_options(refused: Refused, txt: Path, prepared: Path) -> None:
    """Training options with a given tokenizer, and --valid without INPUT, are clashes."""
    model = prepared / "spm.model"
    assert "Drop one of the two" in refused(txt, "--tokenizer", model, "--vocab-size", 330)
    assert "without INPUT" in refused("--valid", txt)
    assert "not a sentencepiece model" in refused(txt, "--tokenizer", txt)
    assert "legal are fairseq, megatron" in refused(txt, "--frameworks", "jax")
