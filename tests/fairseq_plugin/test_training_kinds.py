"""fairseq's own commands on masked language models and encoder-decoders, with real text."""

from __future__ import annotations

import re
import statistics as stdlib_module
import subprocess
import sys
from pathlib import Path

import torch
from conftest import USER_DIR, environment
from test_training import logged

from normplugin.cli import main

LINES = [
    line.strip()
    for name in ("argparse", "statistics")
    for line in (Path(stdlib_module.__file__).parent / f"{name}.py").read_text().splitlines()
    if 20 < len(line.strip()) < 60
]
OPTIMIZER = [
    *("--optimizer", "adam", "--lr", "1e-3", "--cpu", "--num-workers", "0", "--batch-size", "16"),
    *("--log-format", "json", "--log-interval", "1", "--max-valid-steps", "2"),
]
PREDICT = """
import torch
from normplugin.fairseq_plugin.masked_lm import NormMaskedLanguageModel as Model
options = dict(bpe="sentencepiece", sentencepiece_model={spm!r}, user_dir={user_dir!r})
plain = Model.from_pretrained("ck", "checkpoint_last.pt", {data!r}, **options)
for model in (plain, plain.eval()):
    filled = model.fill_mask("return <mask>.name", topk=3)
    assert len(filled) == 3 and filled[0][1] >= filled[1][1] > 0, filled
tokens = plain.encode("raise ValueError(name)")
features = plain.extract_features(tokens)
assert features.shape == (1, len(tokens), 128)
tuned = Model.from_pretrained("tuned", "checkpoint_last.pt", {labelled!r}, **options)
tuned.eval()
scores = tuned.predict("kind", tokens)
assert scores.shape == (1, 2)
torch.testing.assert_close(scores.exp().sum(), torch.tensor(1.0))
print("PREDICTED")
"""


def labelled(folder: Path, vocabulary: Path, regression: bool) -> Path:
    """Lines of code, told by whether they call something, or by their length."""
    rows = (
        f"{len(line) / 60 if regression else 'call' if '(' in line else 'other'}\t{line}\n"
        for line in LINES[:200]
    )
    name = "scores" if regression else "classes"
    text = folder / f"{name}.tsv"
    text.write_text("".join(rows))
    argv = ["prepare", "--labelled", str(text), "--tokenizer", str(vocabulary), "--quiet"]
    argv += ["--out", str(folder / name), "--valid-fraction", "0.1"]
    assert main([*argv, *["--regression"] * regression]) == 0
    return folder / name / "fairseq"


def test_masked_lm_from_text_to_prediction(prepared, fairseq, tmp_path):
    """Pre-train, refuse another scheme, fine-tune for classes and scores, fill in and predict."""
    masked = [
        *(prepared / "fairseq", "--task", "masked_lm", "--criterion", "masked_lm"),
        *("--tokens-per-sample", "64", "--max-update", "10", "--save-dir", "ck", *OPTIMIZER),
    ]
    done = fairseq("train", *masked, "--arch", "normformer_mlm_tiny", "--residual-scale")
    assert 10 in logged(done.stdout + done.stderr)
    refused = fairseq("train", *masked, "--arch", "periln_mlm_tiny", ok=False)
    assert refused.returncode != 0
    assert "scheme 'normformer' does not fit the model's 'periln'" in refused.stderr
    assert main(["describe", str(tmp_path / "ck" / "checkpoint_last.pt")]) == 0

    tune = [
        *("--arch", "normformer_mlm_tiny", "--residual-scale", "--task", "sentence_prediction"),
        *("--criterion", "sentence_prediction", "--max-positions", "64", "--init-token", "0"),
        *("--restore-file", "ck/checkpoint_last.pt", "--reset-optimizer", "--reset-dataloader"),
        *("--reset-meters", "--reset-lr-scheduler", "--max-update", "8", *OPTIMIZER),
        *("--classification-head-name", "kind", "--shorten-method", "truncate"),
    ]
    classes = labelled(tmp_path, prepared, regression=False)
    done = fairseq("train", classes, *tune, "--num-classes", "2", "--save-dir", "tuned")
    assert "valid_accuracy" in done.stdout + done.stderr
    scores = labelled(tmp_path, prepared, regression=True)
    regression = ["--num-classes", "1", "--regression-target", "--save-dir", "scored"]
    assert 8 in logged(fairseq("train", scores, *tune, *regression).stdout)

    script = PREDICT.format(
        spm=str(prepared / "spm.model"),
        user_dir=str(USER_DIR),
        data=str(prepared / "fairseq"),
        labelled=str(classes),
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.endswith("PREDICTED\n"), done.stderr[-3000:]


def test_translation_from_text_to_beam_search(fairseq, tmp_path):
    """Train on a copy task made by fairseq-preprocess, refuse another scheme, translate, align."""
    spaced = [" ".join(re.findall(r"\w+|\S", line)) for line in LINES]
    for split, lines in (("train", spaced[:-20]), ("valid", spaced[-20:])):
        for language in ("src", "tgt"):
            (tmp_path / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    fairseq(
        "preprocess", "-s", "src", "-t", "tgt", "--trainpref", "train", "--validpref", "valid",
        "--destdir", "data", "--joined-dictionary",
    )  # fmt: skip
    train = [
        *("data", "--task", "translation", "--share-all-embeddings", "--max-update", "8"),
        *("--save-dir", "ck", "--max-source-positions", "64", *OPTIMIZER),
    ]
    done = fairseq("train", *train, "--arch", "periln_mt_tiny")
    losses = logged(done.stdout + done.stderr)
    assert float(losses[8][0]) < float(losses[1][0])
    refused = fairseq("train", *train, "--arch", "normformer_mt_tiny", ok=False)
    assert "scheme 'periln' does not fit the model's 'normformer'" in refused.stderr
    assert main(["describe", str(tmp_path / "ck" / "checkpoint_last.pt")]) == 0

    state = torch.load(tmp_path / "ck" / "checkpoint_last.pt", weights_only=True)["model"]
    assert {"encoder.norm_card", "decoder.norm_card"} <= state.keys()
    done = fairseq(
        "generate", "data", "--path", "ck/checkpoint_last.pt", "--gen-subset", "valid", "--cpu",
        "--beam", "2", "--max-len-b", "8", "--print-alignment",
        "--required-batch-size-multiple", "1",
        "--model-overrides", "{'decoder_layers_to_keep': '0,3', 'encoder_layers_to_keep': '1'}",
    )  # fmt: skip
    assert len(re.findall(r"^H-\d+\t", done.stdout, re.MULTILINE)) == 20
    assert re.search(r"^A-\d+\t\d+-\d+", done.stdout, re.MULTILINE)
