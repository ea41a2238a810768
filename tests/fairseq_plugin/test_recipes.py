"""The recipes of examples/ and the hydra configs run as they are, at their tiny size."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, USER_DIR, environment

from normplugin.cli import main


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """A copy task made of real lines, prepared for translation."""
    folder = tmp_path_factory.mktemp("pairs")
    source = Path(os.__file__).read_text().splitlines()
    text = "\n".join(line.strip() for line in source if len(line.split()) in range(3, 9))
    for language in ("src", "tgt"):
        (folder / f"copy.{language}").write_text(text + "\n")
    files = ["--source", str(folder / "copy.src"), "--target", str(folder / "copy.tgt")]
    out = ["--out", str(folder / "out"), "--vocab-size", "400", "--quiet"]
    assert main(["prepare", *files, *out]) == 0
    return folder / "out" / "fairseq"


def run(argv: list[object], cwd: Path, ok: bool = True, **variables: str) -> str:
    done = subprocess.run(
        list(map(str, argv)), cwd=cwd, env={**environment(), "PYTHON": sys.executable, **variables},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode == 0) == ok, done.stderr[-3000:]
    return done.stdout + done.stderr


def hydra(*words: object) -> list[object]:
    return [
        sys.executable,
        "-m",
        "fairseq_cli.hydra_train",
        "--config-dir",
        USER_DIR / "config",
        *words,
    ]


@pytest.mark.parametrize(
    ("script", "scheme"),
    [("perioln/train_fairseq_mlm.sh", ""), ("normformer/train_fairseq_mt.sh", "preln")],
)
def test_scripts(script, scheme, prepared, pairs, tmp_path):
    """A recipe trains the scheme of its folder, or the one asked for, from any folder."""
    masked = "mlm" in script
    data = prepared / "fairseq" if masked else pairs
    variables = {"SCHEME": scheme} if scheme else {}
    said = run([REPO / "examples" / script, "tiny", data, "--max-update", 2], tmp_path, **variables)
    expected = scheme or "periln"
    assert f"norm scheme {expected}" in said and "num_updates: 2 >= max_update: 2" in said
    kind = "mlm" if masked else "mt"
    assert (tmp_path / "checkpoints" / f"{expected}_{kind}_tiny" / "checkpoint_last.pt").exists()


@pytest.mark.parametrize("kind", ["mlm", "mt"])
def test_scripts_say_what_is_wrong(kind, tmp_path):
    """A missing folder, an unknown size and no arguments end with a line and code 2."""
    script = REPO / "examples" / "perioln" / f"train_fairseq_{kind}.sh"
    assert "DATA: got nothing, which holds no dict" in run(
        [script, "tiny", "nothing"], tmp_path, ok=False
    )
    (tmp_path / "dict.txt").touch()
    (tmp_path / "dict.x.txt").touch()
    assert "SIZE: got 'huge'; legal are tiny" in run([script, "huge", tmp_path], tmp_path, ok=False)
    assert "DATA  the fairseq folder" in run([script], tmp_path, ok=False)


@pytest.mark.parametrize("name", ["normformer_mlm_tiny", "periln_mt_tiny"])
def test_hydra_configs(name, prepared, pairs, tmp_path):
    """A config trains from a foreign folder; its checkpoint carries the scheme."""
    data = os.path.relpath(pairs if "mt" in name else prepared / "fairseq", tmp_path)
    words = ["--config-name", name, f"task.data={data}", f"common.user_dir={USER_DIR}"]
    said = run(hydra(*words, "optimization.max_update=2"), tmp_path)
    assert f"norm scheme {name.split('_')[0]}" in said
    checkpoint = tmp_path / "checkpoints" / name / "checkpoint_last.pt"
    assert main(["describe", str(checkpoint)]) == 0


def test_hydra_finds_the_plugin_beside_the_configs(prepared, tmp_path):
    """No user dir has to be given where hydra says from where it read (1.1 and later)."""
    import hydra as package

    if re.match(r"1\.0\.", package.__version__):
        pytest.skip("hydra 1.0 does not say it; the configs' heads tell what to add")
    words = ["--config-name", "periln_tiny", f"task.data={prepared / 'fairseq'}"]
    assert "norm scheme periln" in run(hydra(*words, "optimization.max_update=2"), tmp_path)


def test_hydra_refuses_with_a_sentence(prepared, tmp_path):
    """A scheme that contradicts the architecture ends the run before training."""
    words = ["--config-name", "periln_tiny", f"task.data={prepared / 'fairseq'}"]
    words += [f"common.user_dir={USER_DIR}", "+model.norm_scheme=postln"]
    said = run(hydra(*words), tmp_path, ok=False)
    assert "--norm-scheme: got 'postln' with --arch periln_tiny" in said
