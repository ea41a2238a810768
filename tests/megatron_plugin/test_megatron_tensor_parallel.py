"""Tensor and sequence parallelism on gloo processes: the function and gradients of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron_builders import DIMS, build_layer, config, on_cpu, start

from normplugin.megatron_plugin.norms import ShardedNorm
from normplugin.placement import SCHEMES, resolve_scheme
from normplugin.testing import gradients, randomize_

HERE = Path(__file__).parent
S, B = 8, 2
CASES = [(name, {}, {}) for name in SCHEMES] + [
    ("normformer", {"residual_scale": True, "qk_norm": "head"}, {"normalization": "RMSNorm"}),
    ("normformer", {"head_scale": "after-out-proj"}, {"layernorm_zero_centered_gamma": True}),
    ("A+C", {"qk_norm": "full", "residual_scale": True}, {"normalization": "RMSNorm"}),
    ("periln", {"head_scale": "before-out-proj"}, {"num_query_groups": 2}),
    ("outputln", {}, {"num_query_groups": 2}),
]


def expected_cases() -> list[dict]:
    """Parameters, input, output and gradients of every case on one process."""
    cases = []
    for (name, options, changes), parallel in [
        (case, sp) for case in CASES for sp in (False, True)
    ]:
        scheme = resolve_scheme(name, **options)
        layer = build_layer(scheme, config(**changes))
        randomize_(layer)
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(S, B, DIMS.d_model, generator=generator, dtype=torch.float64)
        x.requires_grad_()
        hidden = torch.triu(torch.ones(1, 1, S, S, dtype=torch.bool), 1)
        out, _ = layer(x, attention_mask=hidden)
        found = gradients(out, {"x": x}, layer, seed=1)
        generator = torch.Generator().manual_seed(1)  # the projection that `gradients` draws
        weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        cases.append(
            {
                "id": f"{name} {options} {changes} sequence_parallel={parallel}",
                "scheme": scheme,
                "changes": changes,
                "sequence_parallel": parallel,
                "parameters": {n: p.detach() for n, p in layer.named_parameters()},
                "x": x.detach(),
                "out": out.detach(),
                "weights": weights,
                "gradients": found,
            }
        )
    return cases


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_equal_one_process(world, tmp_path, monkeypatch):
    """Every scheme, with and without sequence parallelism: outputs and all gradients."""
    monkeypatch.setattr(torch.cuda, "current_device", on_cpu)
    start()
    cases = [
        c for c in expected_cases() if world <= c["changes"].get("num_query_groups", DIMS.n_heads)
    ]
    assert len(cases) >= 2 * len(SCHEMES)
    torch.save(cases, tmp_path / "expected.pt")
    arguments = [str(world), str(tmp_path / "store"), str(tmp_path / "expected.pt")]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "tensor_parallel_worker.py"), str(rank), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    for process in ranks:
        out, err = process.communicate(timeout=300)
        assert out.endswith("EQUAL\n"), err[-3000:]


def test_one_rank_is_the_plain_norm(monkeypatch):
    """On one rank the sharded norm is the plain norm: the function does not depend on TP."""
    monkeypatch.setattr(torch.cuda, "current_device", on_cpu)
    start()
    group = torch.distributed.group.WORLD
    norm = ShardedNorm(config(), DIMS.d_ffn, group)
    randomize_(norm)
    x = torch.randn(S, B, DIMS.d_ffn, dtype=torch.float64)
    plain = torch.nn.functional.layer_norm(x, (DIMS.d_ffn,), norm.weight, norm.bias, 1e-5)
    torch.testing.assert_close(norm(x), plain)
