"""Every quantity is its formula, term by term; the tally is a sum over micro-batches."""

from __future__ import annotations

import math

import pytest
import torch

from normplugin.diagnostics import quantities
from normplugin.diagnostics.mapping import Place
from normplugin.diagnostics.tally import Key, Tally

X = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0)) * 5 + 1
Y = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))


def rows(x: torch.Tensor) -> list[list[float]]:
    return x.double().flatten(0, -2).tolist()


def assert_rows(found: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found.flatten().double(), torch.tensor(expected).double())


def test_variance_is_the_biased_one_over_channels():
    """mean_d (x_d - mean)^2, token by token."""
    expected = []
    for row in rows(X):
        mean = sum(row) / len(row)
        expected.append(sum((v - mean) ** 2 for v in row) / len(row))
    assert_rows(quantities.variance(X), expected)


def test_max_abs_looks_at_both_signs():
    """max_d |x_d|, also of bf16."""
    assert_rows(quantities.max_abs(-X), [max(abs(v) for v in row) for row in rows(X)])
    assert quantities.max_abs(X.bfloat16()).dtype == torch.float32


def test_angular_distance_is_arccos_over_pi():
    """The formula with arccos in fp64; exact at the angles where arccos is not."""
    expected = []
    for x, y in zip(rows(X), rows(Y), strict=True):
        dot = sum(a * b for a, b in zip(x, y, strict=True))
        cosine = dot / math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))
        expected.append(math.acos(cosine) / math.pi)
    assert_rows(quantities.angular_distance(X, Y), expected)
    assert quantities.angular_distance(X, X).abs().max() == 0
    turned = torch.tensor([[math.cos(1e-5), math.sin(1e-5)]])
    angle = quantities.angular_distance(torch.tensor([[1.0, 0.0]]), turned)
    assert angle.item() == pytest.approx(1e-5 / math.pi, rel=1e-4)


def test_headroom_counts_doublings_to_fp16s_largest_number():
    """log2(65504 / max): 0 at the limit, negative above it."""
    assert quantities.headroom_bits(65504.0) == 0
    assert quantities.headroom_bits(65504.0 * 4) == -2
    assert quantities.headroom_bits(0.0) == math.inf


def test_gradient_sums():
    """Sum of squares and of absolute values, without overflow in fp16."""
    g = torch.full((300,), 400.0, dtype=torch.float16)
    assert quantities.square_sum(g).item() == pytest.approx(300 * 400.0**2)
    assert quantities.abs_sum(g).item() == pytest.approx(300 * 400.0)


def test_tally_of_parts_is_the_tally_of_the_whole():
    """Means weigh by tokens, norms add squares, extrema span all; what was never added is None."""
    place = Place("decoder", 1, "ffn")
    mean, norm, low, high, never = (
        Key(place, kind, kind) for kind in ("mean", "norm", "min", "max", "mean")
    )
    never = never._replace(name="never")
    tally = Tally(torch.device("cpu"))
    values = torch.tensor([1.0, -2.0, 3.0, 10.0])
    for part in (values[:1], values[1:]):
        tally.add(mean, part.sum(), part.numel())
        tally.add(norm, part.square().sum())
        tally.extend(low, part.min())
        tally.extend(high, part.max())
    found = tally.read([mean, norm, low, high, never])
    expected = {mean: 3.0, norm: math.sqrt(114), low: -2.0, high: 10.0, never: None}
    assert found == pytest.approx(expected)
    assert list(found) == [mean, norm, low, high, never]
