"""What was written, read by the frameworks' own readers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from normplugin.data import manifest

pytest.importorskip("fairseq")
pytest.importorskip("megatron.core")
SPLITS = ("train", "valid")


def fairseq_items(folder: Path, split: str) -> list[list[int]]:
    """Return every item of a split, by fairseq's loader."""
    from fairseq.data import Dictionary, data_utils

    dictionary = Dictionary.load(str(folder / "fairseq" / "dict.txt"))
    dataset = data_utils.load_indexed_dataset(str(folder / "fairseq" / split), dictionary)
    return [dataset[i].tolist() for i in range(len(dataset))]


def megatron_items(folder: Path, split: str) -> list[list[int]]:
    """Return every document of a split, by Megatron's reader."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(folder / "megatron" / f"{split}_text_document"))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [np.asarray(dataset[i]).tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("split", SPLITS)
def test_same_ids(prepared: Path, split: str) -> None:
    """fairseq's ids are Megatron's plus the offset in the manifest, document by document."""
    offset = manifest.load(prepared).offset
    found = [[i + offset for i in item] for item in megatron_items(prepared, split)]
    assert fairseq_items(prepared, split) == found


@pytest.mark.parametrize("split", SPLITS)
def test_documents_end_with_eos(prepared: Path, split: str) -> None:
    """Every document has one eos, at its end, in both; none holds bos or pad."""
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    for item in fairseq_items(prepared, split):
        assert item[-1] == dictionary.eos() and dictionary.eos() not in item[:-1]
        assert dictionary.bos() not in item and dictionary.pad() not in item
    eos = manifest.load(prepared).ids["eos"]
    assert all(item.index(eos) == len(item) - 1 for item in megatron_items(prepared, split))


def test_counts(prepared: Path, txt: Path) -> None:
    """Documents, words and bytes equal a naive count of the text, tokens the data's length."""
    splits = manifest.load(prepared).splits
    raw = txt.read_bytes()
    assert sum(counts.bytes for counts in splits.values()) == len(raw)
    assert sum(counts.words for counts in splits.values()) == len(raw.decode().split())
    assert sum(counts.documents for counts in splits.values()) == 409
    assert sum(counts.blank_documents for counts in splits.values()) == 1
    for split, counts in splits.items():
        items = megatron_items(prepared, split)
        assert counts.tokens == sum(map(len, items))
        assert counts.documents == len(items)
        assert counts.predicted(eos=False) == counts.tokens - len(items)


def test_dictionary_counts(prepared: Path) -> None:
    """dict.txt counts how often each piece occurs in the training split."""
    from fairseq.data import Dictionary

    dictionary = Dictionary.load(str(prepared / "fairseq" / "dict.txt"))
    found = np.bincount(np.concatenate(fairseq_items(prepared, "train")), minlength=400)
    assert len(dictionary) == manifest.load(prepared).vocabulary["fairseq_rows"] == 400
    assert dictionary.count[4:] == found[4:].tolist()


def test_lossless_round_trip(prepared: Path, txt: Path) -> None:
    """Identity and kept spaces: every document decodes to its line, to the byte."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(prepared / "spm.model"))
    found = [processor.decode(item) for split in SPLITS for item in megatron_items(prepared, split)]
    # sentencepiece writes a space as U+2581, and so cannot tell one from the other.
    lines = [line.replace("\u2581", " ") for line in txt.read_text(encoding="utf-8").split("\n")]
    assert sorted(found) == sorted(line for line in lines if line)


def test_smallest_dtype(prepared: Path) -> None:
    """Both frameworks store ids of a small vocabulary in two bytes."""
    tokens = manifest.load(prepared).splits["train"].tokens
    assert (prepared / "fairseq" / "train.bin").stat().st_size == 2 * tokens
    assert (prepared / "megatron" / "train_text_document.bin").stat().st_size == 2 * tokens


def test_megatron_tokenizer(prepared: Path, txt: Path) -> None:
    """Megatron's own tokenizer gives the ids in the data, and its eod ends each document."""
    from megatron.core.tokenizers import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(
        tokenizer_path=str(prepared / "spm.model"),
        metadata_path={"library": "sentencepiece"},
    )
    items = megatron_items(prepared, "train")
    line = txt.read_text(encoding="utf-8").split("\n")[1]
    assert [*tokenizer.tokenize(line), tokenizer.eod] == items[0]


def test_masked_lm_adds_one_mask(prepared: Path) -> None:
    """fairseq's masked_lm task loads the folder and appends its mask after the last piece."""
    from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask

    task = MaskedLMTask.setup_task(MaskedLMConfig(data=str(prepared / "fairseq")))
    assert task.mask_idx == 400


def test_masked_lm_masks(prepared: Path) -> None:
    """fairseq's masked_lm masks 12% and chooses 15%; with its targets put back it is the text."""
    import torch
    from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask

    data = str(prepared / "fairseq")
    cfg = MaskedLMConfig(data=data, seed=1, tokens_per_sample=64, shorten_method="none")
    task = MaskedLMTask.setup_task(cfg)
    task.load_dataset("train")
    dataset, masks, text = task.dataset("train"), 0, []
    for i in range(len(dataset)):
        source, target = dataset[i]["net_input.src_tokens"], dataset[i]["target"]
        masks += int((source == task.mask_idx).sum())
        restored = torch.where(target == task.source_dictionary.pad(), source, target).tolist()
        assert restored[0] == task.source_dictionary.bos()
        text += restored[1:]
    assert text == [i for item in fairseq_items(prepared, "train") for i in item]
    assert 0.10 < masks / len(text) < 0.14 and task.mask_idx not in text
