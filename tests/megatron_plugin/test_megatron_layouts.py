"""Every parallel layout trains the model of one process, with Megatron's own parts.

Its pipeline schedules, DistributedDataParallel, gradient finalisation, optimizers and distributed
checkpoints run on gloo under the CPU emulation (layouts_worker.py, which needs its own processes).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")
HERE = Path(__file__).parent
REPO = HERE.parents[1]
# Each case loads what the one before it saved: every pair of neighbours reshards a checkpoint.
CHAINS = {
    "normformer": ["tp2", "dp2", "pp2", "sp2", "vpp2"],
    "periln": ["sp2", "pp2", "dp2"],
    "postln": ["tp2", "pp2", "sp2", "vpp2"],
    "outputln": ["sp2", "vpp2", "tp2"],
    "moe": ["ep2", "sp2", "pp2"],
    "postln+distributed": ["dp2", "vpp2"],
    "normformer+distributed": ["dp2", "tp2"],
}
RECOMPUTED = {
    1: [
        "normformer:one-full",
        "moe:one-full",
        "normformer:one-layernorm",
        "outputln:one-layernorm",
        "periln:one-mlp",
    ],
    2: ["normformer:sp2-full", "moe:sp2-full", "periln:sp2-mlp"],
}
CASES = [f"{model}:{layout}" for model, layouts in CHAINS.items() for layout in layouts]
SAVES_OPTIMIZER = [model for model in CHAINS if model != "moe" and "+" not in model]
# Sums over ranks round differently: measured 1e-6 of the largest entry, for the losses 2e-7.
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """Case -> what the worker found, from one process and then from two."""
    folder = tmp_path_factory.mktemp("layouts")
    one = [f"{model}:one" for model in CHAINS]
    _run_ranks(1, folder, one + RECOMPUTED[1])
    _run_ranks(2, folder, CASES + RECOMPUTED[2])
    found: dict[str, dict] = {}
    for world in (1, 2):
        found.update(torch.load(folder / f"world{world}.pt"))
    return found


def _run_ranks(world: int, folder: Path, cases: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "PYTHONPATH": os.pathsep.join([str(REPO), str(HERE)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    # Not as a script: Megatron's saving spawns a helper, which would import the script again.
    command = [sys.executable, "-c", "import layouts_worker; layouts_worker.main()"]
    logs = [folder / f"world{world}_rank{rank}.log" for rank in range(world)]
    ranks = []
    for rank, path in enumerate(logs):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with path.open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    [*command, str(folder), *cases], env=environment, stdout=log, stderr=log
                )
            )
    try:
        codes = [process.wait(timeout=500) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert not any(codes), "\n".join(path.read_text()[-3000:] for path in logs)


def _reference(results: dict, case: str) -> dict:
    return results[f"{case.partition(':')[0]}:one"]


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_those_of_one_process(results, case):
    """Losses and global gradient norms of ten steps, from the weights of a resharded checkpoint."""
    found, expected = results[case], _reference(results, case)
    assert len(found["losses"]) == 10
    for name in ("losses", "norms"):
        torch.testing.assert_close(found[name], expected[name], rtol=RELATIVE, atol=0)
    assert expected["losses"].std() > 0 and expected["norms"].min() > 0


@pytest.mark.parametrize("case", [case for case in CASES if "+" not in case])
def test_every_gradient_is_that_of_one_process(results, case):
    """Every parameter, on every rank that holds it, as the optimizer finds it.

    The distributed optimizer keeps no whole gradient; its weights are compared below.
    """
    found, expected = results[case]["gradients"], _reference(results, case)["gradients"]
    assert found.keys() == expected.keys()
    floor = 1e-6 * max(gradient.abs().max() for (gradient,) in expected.values())
    for name, (gradient,) in expected.items():
        allowed = RELATIVE * gradient.abs().max() + floor
        for copy in found[name]:
            assert copy.shape == gradient.shape, name
            assert (copy - gradient).abs().max() <= allowed, name


@pytest.mark.parametrize("case", CASES)
def test_resharded_checkpoints_are_bit_equal(results, case):
    """A checkpoint loaded in one layout and saved in another holds the same bits, whole."""
    found, expected = results[case]["start"], _reference(results, case)["start"]
    expected = {name: value for name, value in expected.items() if torch.is_tensor(value)}
    assert len(expected) > 10
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)
    assert not {name for name in found if torch.is_tensor(found[name])} - expected.keys()


@pytest.mark.parametrize("case", [case for case in CASES if case.split(":")[0] in SAVES_OPTIMIZER])
def test_optimizer_state_travels(results, case):
    """Checkpoints hold both Adam moments of every parameter; after ten more steps they agree."""
    found, expected = results[case]["end"], _reference(results, case)["end"]
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = {f"optimizer.state.{kind}.{name}" for name in _weights(expected)}
        assert moments <= expected.keys()
        top = max(expected[name].abs().max() for name in moments)
        for name in moments:
            assert (found[name] - expected[name]).abs().max() <= RELATIVE * top, name


@pytest.mark.parametrize("case", CASES)
def test_weights_after_ten_steps(results, case):
    """Every weight, whole, within 1/300 of the way Adam can go (measured: 1/1000)."""
    found, expected = results[case]["end"], _reference(results, case)["end"]
    for name in _weights(expected):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=3e-5, msg=name)


def _weights(tensors: dict) -> list[str]:
    return [
        name
        for name, value in tensors.items()
        if torch.is_tensor(value) and not name.startswith("optimizer") and "_extra" not in name
    ]


@pytest.mark.parametrize("case", RECOMPUTED[1] + RECOMPUTED[2])
def test_recomputing_changes_nothing(results, case):
    """Full and selective activation recompute: the losses and gradient norms of keeping them."""
    found, expected = results[case], _reference(results, case)
    steps = len(found["losses"])
    for name in ("losses", "norms"):
        torch.testing.assert_close(found[name], expected[name][:steps], rtol=RELATIVE, atol=0)


@pytest.mark.parametrize("model", [model for model in CHAINS if "+" not in model])
def test_added_parameters_are_not_decayed(results, model):
    """Megatron's optimizer decays matrices only: no norm and no scale."""
    decay = results[f"{model}:one"]["decayed"]
    undecayed = {name for name, value in decay.items() if value == 0}
    for name, value in decay.items():
        added = "norm" in name or name.endswith(("_scale", ".bias"))
        assert value == (0 if added else 0.1), name
    assert any("norm" in name for name in undecayed)
