"""The Megatron benchmark's counts: collectives, bytes sent, saved activations. No time is asserted.

The expected numbers are derived here from the layer's structure, not read off a run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from normplugin.placement import Dims

ROOT = Path(__file__).resolve().parents[2]
DIMS = Dims(n_layers=2, d_model=64, d_ffn=256, n_heads=4)
STOCK, ALONE, TP, SP = "stock local", "TP=1", "TP=2", "TP=2 SP"
TOKENS, FP32 = 32, 4
# Norms beyond Pre-LN's; their statistics are 2 floats each per token.
ADDED_NORMS = {"preln": 0, "postln": 0, "periln": 2, "normformer": 2, "outputln": 2}


@pytest.fixture(scope="module")
def counted():
    """Counts by layout and variant; two processes over gloo for the parallel ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))  # the benchmarks lie beside the tests, not installed
        patch.setenv("OMP_NUM_THREADS", "1")
        import torch

        from benchmarks.megatron_counts import count_all

        if torch.distributed.is_initialized():  # by another file of this folder
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
        return count_all(DIMS)


def extra_calls(found: dict, name: str) -> tuple[int, int]:
    mine, stock = found[name], found[STOCK]
    return tuple(
        getattr(mine, mode).calls - getattr(stock, mode).calls for mode in ("forward", "backward")
    )


def test_one_rank_has_no_collective(counted):
    """TP=1 sends nothing, whatever the scheme."""
    for found in counted[ALONE].values():
        assert found.forward.calls == found.backward.calls == 0


def test_stock_is_megatrons_own_count(counted):
    """Per sublayer one all-reduce each way; under SP gather and scatter, one gather more back."""
    stock = counted[TP][STOCK]
    assert (stock.forward.calls, stock.backward.calls) == (2, 2)
    whole = TOKENS * DIMS.d_model * FP32  # an all-reduce over two ranks sends 2 * 1/2 of it
    assert stock.forward.sent == stock.backward.sent == 2 * whole
    stock = counted[SP][STOCK]
    assert (stock.forward.calls, stock.backward.calls) == (4, 6)
    assert (stock.forward.sent, stock.backward.sent) == (4 * whole // 2, 6 * whole // 2)


@pytest.mark.parametrize("layout", [TP, SP])
def test_extra_collectives(counted, layout):
    """The hidden norm costs one collective each way, a norm over replicated width none.

    OLMo 2's two norms over sharded queries and keys cost one each.
    """
    expected = {"preln": 0, "periln": 0, "postln": 0, "normformer": 1, "outputln": 2}
    for name, extra in expected.items():
        assert extra_calls(counted[layout], name) == (extra, extra), name


@pytest.mark.parametrize("layout", [TP, SP])
def test_hidden_norm_sends_two_numbers_per_token(counted, layout):
    """Forward: 2 fp32 per token to the other rank; backward: an all-reduce of 2 fp32."""
    found = counted[layout]
    for mode in ("forward", "backward"):
        mine, stock = getattr(found["normformer"], mode), getattr(found[STOCK], mode)
        assert mine.sent - stock.sent == 2 * TOKENS * FP32


@pytest.mark.parametrize("layout", [ALONE, TP, SP])
def test_saved_activations(counted, layout):
    """What autograd keeps beyond stock's, in d_model elements per token.

    An output norm keeps its input, 1 d (1 / TP under sequence parallelism). NormFormer's scaled
    heads and normalised hidden activation are made again.
    """
    found, tp = counted[layout], 1 if layout == ALONE else 2
    row = 1 / tp if layout == SP else 1  # of the residual stream, per token of the sequence
    limits = {"preln": 0, "postln": 0, "periln": 2 * row, "normformer": row}
    for name, limit in limits.items():
        extra = found[name].saved - found[STOCK].saved
        assert extra <= limit + ADDED_NORMS[name] * 2 / DIMS.d_model + 1e-9, (name, extra)
        assert extra >= limit - 1e-9, (name, extra)


def test_parameters(counted):
    """Each scheme adds those of its sites: LayerNorms of d and d_ffn, one gain per head."""
    d, f, h = DIMS.d_model, DIMS.d_ffn, DIMS.n_heads
    for layout, tp in ((ALONE, 1), (TP, 2), (SP, 2)):
        found = counted[layout]
        extra = {name: c.parameters - found[STOCK].parameters for name, c in found.items()}
        assert extra["preln"] == extra["postln"] == 0
        assert extra["periln"] == 4 * d
        assert extra["normformer"] == 2 * d + (2 * f + h) // tp
