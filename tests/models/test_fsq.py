from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from stability.structure.tokenizer import FSQ

LEVELS = [(7, 5, 5, 5, 5), (8, 5, 5, 5), (2, 3, 4), (6,)]


@pytest.mark.parametrize("levels", LEVELS)
def test_codes_and_indices_are_a_bijection_over_the_whole_codebook(levels):
    fsq = FSQ(levels)
    indices = torch.arange(fsq.num_codes)
    codes = fsq.codes(indices)
    assert torch.equal(fsq.indices(codes), indices)
    assert len({tuple(code) for code in codes.tolist()}) == fsq.num_codes == int(np.prod(levels))


@pytest.mark.parametrize("levels", LEVELS)
def test_indices_are_mixed_radix_numbers_of_the_digits(levels):
    """Against numpy's own mixed-radix numbers, whose last digit is the least significant."""
    fsq = FSQ(levels)
    digits = np.array(list(itertools.product(*map(range, levels))))
    expected = np.ravel_multi_index(tuple(digits[:, ::-1].T), levels[::-1])
    half = np.array(levels) // 2
    codes = torch.tensor((digits - half) / half, dtype=torch.float32)
    assert fsq.indices(codes).tolist() == expected.tolist()


@pytest.mark.parametrize("levels", LEVELS)
def test_quantization_reaches_every_code_and_leaves_the_grid_nowhere(levels):
    fsq = FSQ(levels)
    z = 40 * torch.randn(20_000, len(levels), generator=torch.Generator().manual_seed(0)) * torch.rand(20_000, 1).pow(6)
    codes = fsq(z)
    assert torch.equal(fsq.codes(fsq.indices(codes)), codes)
    for dim, count in enumerate(levels):
        assert len(codes[:, dim].unique()) == count
    assert codes.abs().max() <= 1


def test_odd_levels_round_the_scaled_tanh():
    fsq, z = FSQ((7, 5)), torch.linspace(-4, 4, 401)[:, None].expand(-1, 2)
    expected = torch.stack([(torch.tanh(z[:, 0]) * 3).round() / 3, (torch.tanh(z[:, 1]) * 2).round() / 2], -1)
    near_an_edge = (
        torch.stack([(torch.tanh(z[:, 0]) * 3) % 1 - 0.5, (torch.tanh(z[:, 1]) * 2) % 1 - 0.5], -1).abs() < 0.01
    )
    assert torch.equal(fsq(z)[~near_an_edge], expected[~near_an_edge])


@pytest.mark.parametrize("levels", LEVELS)
def test_the_gradient_is_that_of_the_bound_as_if_nothing_were_rounded(levels):
    fsq = FSQ(levels).double()
    z = torch.randn(
        50, len(levels), dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(1)
    )
    weight = torch.randn(50, len(levels), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (weight * fsq(z)).sum().backward()
    step = 1e-6
    with torch.no_grad():
        slope = (fsq.bound(z + step) - fsq.bound(z - step)) / (2 * step)
        expected = weight * slope / (torch.tensor(levels) // 2)
    torch.testing.assert_close(z.grad, expected, rtol=1e-6, atol=1e-9)


def test_zero_is_the_middle_code_of_even_levels_too():
    assert FSQ((8, 4, 2))(torch.zeros(1, 3)).abs().max() == 0


def test_an_index_outside_the_codebook_is_refused():
    with pytest.raises(ValueError, match=r"lie in 0 … 34; got -1 … 35"):
        FSQ((7, 5)).codes(torch.tensor([-1, 35]))
    with pytest.raises(ValueError, match="at least 2 levels"):
        FSQ((7, 1))
