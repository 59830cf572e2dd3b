from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stability.objectives._graph import log_expm1
from stability.objectives.score_entropy import Geometric, LogLinear, times

EPSILON = 1e-3


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("noise", [LogLinear(EPSILON), Geometric(1e-4, 20.0)])
def test_the_rate_is_the_derivative_of_the_total_noise(noise):
    t = torch.linspace(1e-3, 1, 50, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(noise.rate(t), torch.autograd.grad(noise.sigma(t).sum(), t)[0], rtol=1e-12, atol=0)


def test_rate_times_r_is_one_over_t_under_log_linear_noise():
    t = torch.linspace(1e-3, 1, 1000, dtype=torch.float64)
    noise = LogLinear(EPSILON)
    torch.testing.assert_close(noise.rate(t) * (-log_expm1(noise.sigma(t))).exp(), 1 / t, rtol=1e-10, atol=0)
    torch.testing.assert_close(
        noise.rate(t.float()) * (-log_expm1(noise.sigma(t.float()))).exp(), 1 / t.float(), rtol=2e-4, atol=0
    )


def test_noise_ends_where_the_schedules_say():
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert LogLinear(EPSILON).sigma(ends).tolist() == pytest.approx([0, -math.log(EPSILON)])
    assert Geometric(1e-4, 20.0).sigma(ends).tolist() == pytest.approx([1e-4, 20])


def test_log_expm1_is_right_at_both_ends():
    sigma = torch.tensor([1e-12, 1e-4, 1.0, 20.0, 700.0], dtype=torch.float64)
    assert log_expm1(sigma).tolist() == pytest.approx([math.log(math.expm1(x)) for x in sigma.tolist()], rel=1e-12)
    assert log_expm1(torch.tensor(200.0)).item() == 200.0


def test_times_are_uniform_from_a_thousandth_to_one_and_spread_over_each_batch():
    assert np.quantile(times(20_000, generator()).numpy(), [0, 0.25, 0.5, 0.75, 1]) == pytest.approx(
        [1e-3, 0.25075, 0.5005, 0.75025, 1], abs=1e-3
    )
    small = np.stack([np.sort(times(4, generator(seed)).numpy()) for seed in range(300)])
    assert (np.diff(small, axis=1) > 0.24).all()
    assert small.mean() == pytest.approx(0.5005, abs=1e-2)
    assert small.min() >= 1e-3
