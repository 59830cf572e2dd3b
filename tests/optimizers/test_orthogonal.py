"""Muon and Turbo-Muon beside torch's own Muon and the polar factor itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stability.optimizers import build
from stability.optimizers.muon import newton_schulz
from stability.optimizers.turbo_muon import rescaled_newton_schulz
from tests.within import assert_within

SHAPES = ((4, 7), (7, 4), (5, 5))
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")


def side_by_side(scale: str, nesterov: bool) -> tuple[list[list[nn.Parameter]], list[Tensor]]:
    """Return the matrices after eight steps of ours and of torch's Muon, in float64, and where they began."""
    draws = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=draws, dtype=torch.float64) for shape in SHAPES]
    ours, theirs = (nn.ParameterList(nn.Parameter(each.clone()) for each in start) for _ in range(2))
    settings = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.2}
    pair = [
        build("muon", ours, lr=0.05, scale=scale, **settings),
        torch.optim.Muon(theirs.parameters(), lr=0.05, adjust_lr_fn=scale, **settings),
    ]
    for _ in range(8):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=draws, dtype=torch.float64)
            other.grad = one.grad.clone()
        for optimizer in pair:
            optimizer.step()
    return [list(module.parameters()) for module in (ours, theirs)], start


@needs_muon
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_muons_steps_are_torchs_but_for_its_rounding_to_bfloat16(scale, nesterov, monkeypatch):
    (ours, theirs), start = side_by_side(scale, nesterov)
    for one, other, begun in zip(ours, theirs, start, strict=True):
        assert (one - other).norm() / (other - begun).norm() > 1e-5
        assert_within((one - other).norm() / (other - begun).norm(), 0.02)
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    (ours, theirs), _ = side_by_side(scale, nesterov)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("polar", "error"), [(newton_schulz, 0.217), (rescaled_newton_schulz, 0.032)])
def test_polar_error_of_a_gaussian_is_as_measured_of_the_published_code(polar, error):
    found = []
    for seed in range(4):
        matrix = np.random.default_rng(seed).standard_normal((64, 256))
        left, _, right = np.linalg.svd(matrix, full_matrices=False)
        near = polar(torch.from_numpy(matrix)).numpy()
        found.append(np.linalg.norm(near - left @ right) / np.linalg.norm(left @ right))
    assert np.mean(found) == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize("polar", [newton_schulz, rescaled_newton_schulz])
def test_a_tall_matrix_is_the_wide_one_turned_and_scale_does_not_count(polar):
    matrix = torch.randn(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(polar(matrix.mT), polar(matrix).mT, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(polar(1e4 * matrix), polar(matrix), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("polar", [newton_schulz, rescaled_newton_schulz])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-12, 1e12])
def test_no_gradient_is_too_small_or_too_large_for_a_finite_step(polar, size):
    matrix = size * torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    found = polar(matrix)
    assert found.isfinite().all() and torch.linalg.matrix_norm(found, 2) < 1.3
    matrix[2] = 0
    assert polar(matrix).isfinite().all()
