"""Starting Megatron's own trainer in processes of its own, and reading what it prints."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
ENTRY = "normplugin.megatron_plugin.pretrain_gpt"
LAUNCH = "normplugin.megatron_plugin.launch"
TINY = (
    "--cpu-emulation --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 8 "
    "--lr 1e-3 --lr-decay-style cosine --log-interval 1 --eval-interval 4 --eval-iters 2 "
    "--make-vocab-size-divisible-by 128 --tokenizer-type SentencePieceTokenizer"
).split()
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel".split()


def environment() -> dict[str, str]:
    """The environment of a run: one thread, this checkout first, no GPU."""
    path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
    cpu = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    port = {"MASTER_PORT": str(_free_port())}
    return {**os.environ, **cpu, **port, "PYTHONPATH": path, "PYTHON": sys.executable}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def data_options(data: Path) -> list[str]:
    """Megatron's options for a folder of ``normplugin prepare``."""
    files = data / "megatron"
    return [
        *("--train-data-path", str(files / "train_text_document")),
        *("--valid-data-path", str(files / "valid_text_document")),
        *("--tokenizer-model", str(data / "spm.model")),
    ]


def torchrun(processes: int, *words: object) -> list[str]:
    """The command line of ``torchrun -m MODULE ...`` on this node."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*run, "--nproc-per-node", str(processes), "-m", *map(str, words)]


def execute(command: list[str], cwd: Path, ok: bool = True) -> str:
    """Run a command; return all it printed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert (done.returncode == 0) is ok, done.stdout[-5000:]
    return done.stdout


def losses(log: str) -> dict[int, tuple[float, float]]:
    """Iteration -> (loss, gradient norm) of Megatron's log.

    Megatron (0.19 training.py, training_log) does not reset its sum after the first iteration of a
    process: the second line is the mean of two. Undone here.
    """
    found = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+).*?grad norm: (\S+)", log)
    values = {int(step): (float(loss), float(norm)) for step, loss, norm in found}
    first = min(values)
    if first + 1 in values:
        mean, norm = values[first + 1]
        values[first + 1] = (2 * mean - values[first][0], norm)
    return values


def validation_losses(log: str) -> list[float]:
    """The validation losses of a log, in order."""
    return [float(value) for value in re.findall(r"validation loss .*?lm loss value: (\S+)", log)]


def errors(log: str) -> list[str]:
    """The errors of ours in a log, each once, without the rank that found it."""
    return sorted(set(re.findall(r"normplugin\.megatron_plugin\.\w+: error: (.*)", log)))
