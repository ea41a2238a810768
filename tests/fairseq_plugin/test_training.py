"""fairseq's own commands: train, kill, resume, evaluate, generate, two processes, low precision."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import USER_DIR, command, environment

from normplugin.cli import main

ARCHITECTURES = {
    "preln": ["--arch", "preln_tiny"],
    "postln": ["--arch", "postln_tiny"],
    "periln": ["--arch", "periln_tiny"],
    "normformer": ["--arch", "normformer_tiny", "--recompute-ffn-norm", "--residual-scale"],
    "outputln": ["--arch", "outputln_tiny"],
    "A+C": ["--arch", "preln_tiny", "--norm-scheme", "A+C"],
}
UPDATES = 14


def training(data: Path, *arguments: object, batch: int = 16) -> list[str]:
    return [
        str(data / "fairseq"), "--task", "language_modeling", "--tokens-per-sample", "64",
        "--batch-size", str(batch), "--share-decoder-input-output-embed",
        "--optimizer", "adam", "--lr", "1e-3", "--max-update", str(UPDATES), "--cpu",
        "--num-workers", "0", "--log-format", "json", "--log-interval", "1",
        "--save-interval-updates", "5", "--max-valid-steps", "2", *map(str, arguments),
    ]  # fmt: skip


def logged(text: str) -> dict[int, tuple[str, str]]:
    """Update -> (loss, gradient norm) of every ``train_inner`` line."""
    found = {}
    for line in text.splitlines():
        match = re.search(r"\| train_inner \| (\{.*\})", line)
        if match:
            record = json.loads(match[1])
            found[int(record["num_updates"])] = (record["loss"], record["gnorm"])
    return found


def weights(folder: Path, name: str = "checkpoint_last.pt") -> dict[str, torch.Tensor]:
    state = torch.load(folder / name, weights_only=True)["model"]
    # 0.12.2's sinusoidal positions hold a buffer that is never set
    return {key: value for key, value in state.items() if not key.endswith("_float_tensor")}


def kill_after(update: int, argv: list[str], cwd: Path) -> None:
    """Start training and kill it (-9) once it has logged this update."""
    with subprocess.Popen(
        argv,
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if any(done >= update for done in logged(line)):
                process.send_signal(signal.SIGKILL)
                return
    raise AssertionError(f"training ended before update {update}")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_train_kill_resume_evaluate_generate(name, prepared, fairseq, tmp_path):
    """Killed in mid-epoch and resumed, a run ends with the weights of an undisturbed one.

    Its checkpoint then evaluates and generates through fairseq's own commands.
    """
    argv = ARCHITECTURES[name]
    whole = fairseq("train", *training(prepared, *argv, "--save-dir", "whole"))
    kill_after(6, command("train", *training(prepared, *argv, "--save-dir", "cut")), tmp_path)
    resumed = fairseq("train", *training(prepared, *argv, "--save-dir", "cut"))
    expected, found = logged(whole.stdout + whole.stderr), logged(resumed.stdout + resumed.stderr)
    assert set(expected) == set(range(1, UPDATES + 1))
    assert 1 not in found and UPDATES in found
    assert found == {update: expected[update] for update in found}
    for key, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "cut")[key]), key

    evaluated = fairseq(
        "eval_lm", prepared / "fairseq", "--path", "cut/checkpoint_last.pt", "--cpu",
        "--tokens-per-sample", 64, "--batch-size", 16, "--gen-subset", "valid",
    )  # fmt: skip
    assert "Perplexity" in evaluated.stdout + evaluated.stderr
    spoken = fairseq(
        "interactive", prepared / "fairseq", "--task", "language_modeling", "--path",
        "cut/checkpoint_last.pt", "--cpu", "--beam", 2, "--max-len-b", 8,
        "--bpe", "sentencepiece", "--sentencepiece-model", prepared / "spm.model",
        stdin="def wrap(\n",
    )  # fmt: skip
    assert re.search(r"^D-0\t\S+\tdef wrap\(", spoken.stdout, re.MULTILINE)


def test_from_pretrained_scores_as_eval_lm(prepared, fairseq, tmp_path):
    """In a fresh process from_pretrained finds the model and gives eval-lm's loss."""
    fairseq("train", *training(prepared, "--arch", "normformer_tiny", "--save-dir", "ck"))
    script = f"""
import math
from normplugin.fairseq_plugin.models import NormLanguageModel
hub = NormLanguageModel.from_pretrained(
    "ck", "checkpoint_last.pt", {str(prepared / "fairseq")!r}, user_dir={str(USER_DIR)!r})
hub.task.load_dataset("valid")
total = count = 0
for sample in hub.task.datasets["valid"]:
    tokens, target = sample["source"][None], sample["target"][None]
    logits = hub.models[0](tokens)[0].log_softmax(-1)
    total -= logits.gather(-1, target[..., None]).sum().item()
    count += target.numel()
print("LOSS", total / count / math.log(2))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # The two runs cut the text into the same windows of 64 tokens; eval-lm prints four decimals.
    evaluated = fairseq(
        "eval_lm", prepared / "fairseq", "--path", "ck/checkpoint_last.pt", "--cpu",
        "--tokens-per-sample", 64, "--batch-size", 4, "--gen-subset", "valid",
    )  # fmt: skip
    loss = float(re.search(r"Loss \(base 2\): ([\d.]+)", evaluated.stdout + evaluated.stderr)[1])
    assert float(re.search(r"LOSS ([\d.]+)", done.stdout)[1]) == pytest.approx(loss, abs=2e-4)


def test_two_processes_equal_one(prepared, fairseq, tmp_path):
    """Two gloo processes give the weights of one process with --update-freq 2."""
    options = [
        *ARCHITECTURES["normformer"], "--dropout", 0, "--attention-dropout", 0,
        "--max-update", 4, "--clip-norm", 1.0,
    ]  # fmt: skip
    single = training(prepared, *options, "--update-freq", 2, "--save-dir", "one")
    fairseq("train", *single)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    parallel = [
        "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp",
        "--distributed-world-size", 2, "--distributed-no-spawn",
        "--distributed-init-method", address, "--save-dir", "two",
    ]  # fmt: skip
    ranks = [
        subprocess.Popen(
            command("train", *training(prepared, *options, *parallel, "--distributed-rank", rank)),
            cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in ranks:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output[-3000:]
    two = weights(tmp_path / "two")
    for key, value in weights(tmp_path / "one").items():
        # fp32 sums in another order, four Adam steps of 1e-3: far below one step
        torch.testing.assert_close(two[key], value, rtol=0, atol=2e-5, msg=lambda m, k=key: k + m)


def test_memory_efficient_fp16(prepared, fairseq, tmp_path):
    """Half precision with loss scaling trains and spares the norms from weight decay."""
    options = [*ARCHITECTURES["normformer"], "--memory-efficient-fp16", "--max-update", 4]
    options += ["--optimizer", "adam_decay_exempt", "--weight-decay", 0.1, "--save-dir", "ck"]
    done = fairseq("train", *training(prepared, *options, batch=2))
    losses = logged(done.stdout + done.stderr)
    assert len(losses) >= 3 and all(float(loss) < 12 for loss, _ in losses.values())
    assert re.search(r"weight decay on \d+ tensors .* none on \d+ tensors", done.stdout)
    assert '"loss_scale"' in done.stdout  # half precision was on


def test_resuming_with_another_scheme_is_refused(prepared, fairseq, tmp_path, capsys):
    """A checkpoint of one scheme is not loaded into another, and stays as it is."""
    fairseq("train", *training(prepared, "--arch", "periln_tiny", "--save-dir", "ck"))
    before = (tmp_path / "ck" / "checkpoint_last.pt").read_bytes()
    refused = fairseq(
        "train",
        *training(prepared, "--arch", "normformer_tiny", "--save-dir", "ck", "--max-update", 20),
        ok=False,
    )
    assert refused.returncode != 0
    assert "checkpoint: scheme 'periln' does not fit the model's 'normformer'" in refused.stderr
    assert (tmp_path / "ck" / "checkpoint_last.pt").read_bytes() == before

    assert main(["describe", str(tmp_path / "ck" / "checkpoint_last.pt")]) == 0
    described = capsys.readouterr().out
    assert "scheme periln" in described and "promised norms: all there" in described
    broken = tmp_path / "cut.pt"
    broken.write_bytes(before[: len(before) // 2])
    assert main(["describe", str(broken)]) == 2
    assert "damaged or cut short" in capsys.readouterr().err


def test_upstream_checkpoint_loads_into_preln_only(prepared, fairseq, tmp_path):
    """A plain transformer_lm_gpt checkpoint continues as preln; other schemes refuse it."""
    shape = ["--decoder-layers", 4, "--decoder-embed-dim", 128, "--decoder-ffn-embed-dim", 512]
    shape += ["--decoder-attention-heads", 4, "--max-update", 2, "--save-dir", "ck"]
    fairseq("train", *training(prepared, "--arch", "transformer_lm_gpt", *shape))
    start = ["--finetune-from-model", "ck/checkpoint_last.pt", "--max-update", 1]
    again = training(prepared, "--arch", "preln_tiny", *start, "--save-dir", "preln")
    fairseq("train", *again)
    refused = fairseq(
        "train",
        *training(prepared, "--arch", "periln_tiny", *start, "--save-dir", "peri"),
        ok=False,
    )
    assert refused.returncode != 0
    assert "it holds no architecture card" in refused.stderr
