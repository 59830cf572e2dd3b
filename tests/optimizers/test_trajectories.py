"""Every optimizer goes a way of its own, and down a convex quadratic."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from stability.optimizers import TakingHessian, set_lr
from stability.registry import Registry
from tests.optimizers.checks import Toy, built, steps
from tests.sizes import with_slow

NAMES = Registry("optimizers").names()
NUM_STEPS = 12  # RAdam's first five are those of a mean gradient
SAME = 1e-3  # of two ways that are one: far above rounding, far below what a rule of its own makes of noise
# Settings by which 200 steps on a matrix of 6 x 4 are what the optimizer is for.
OWN = {"galore_adamw": {"every": 10}}  # one projection for all of them would leave out all directions but one


@cache
def way(name: str) -> Tensor:
    """Return how far the toy's parameters go under gradients of noise, at a rate of 1e-2, in one row."""
    part, model = Registry("optimizers").load(name), Toy()
    start = torch.cat([value.detach().flatten() for value in model.parameters()])
    optimizer = built(part, part.Config(), model)
    steps(optimizer, model, 1, NUM_STEPS)
    return torch.cat([value.detach().flatten() for value in model.parameters()]) - start


@pytest.mark.parametrize("name", NAMES)
def test_no_other_optimizer_goes_the_same_way(name):
    for another in NAMES[: NAMES.index(name)]:
        one, other = way(name), way(another)
        assert (one - other).norm() > SAME * max(one.norm(), other.norm()), f"{name} goes the way of {another}"


class Bowl:
    """The loss ½ Σ c_ij (W_ij − T_ij)², with curvatures c between 0.1 and 1, from T a small way off."""

    def __init__(self):
        draws = torch.Generator().manual_seed(1)
        self.target = torch.randn(6, 4, generator=draws, dtype=torch.float64)
        self.curvature = torch.logspace(-1, 0, 24, dtype=torch.float64).view(6, 4)
        self.model = torch.nn.Module()
        away = 0.03 * torch.randn(6, 4, generator=draws, dtype=torch.float64)
        self.model.matrix = torch.nn.Parameter(self.target + away)

    def loss(self) -> Tensor:
        return (self.curvature * (self.model.matrix - self.target) ** 2).sum() / 2


@pytest.mark.parametrize("multiple", with_slow([1.0, 10.0], [3.0]))
@pytest.mark.parametrize("name", NAMES)
def test_a_convex_quadratic_is_descended_at_multiples_of_the_reference_rate(name, multiple):
    """200 steps, a tenth of them warm-up, then down to 0 in a line."""
    part, bowl = Registry("optimizers").load(name), Bowl()
    config = part.Config(**OWN.get(name, {}))
    if "weight_decay" in part.Config.model_fields:
        config = config.model_copy(update={"weight_decay": 0.0})
    optimizer = built(part, config, bowl.model)
    first = bowl.loss().item()
    for step in range(200):
        set_lr(optimizer, multiple * part.lr_reference * min((step + 1) / 20, 1 - (step - 20) / 180))
        optimizer.zero_grad()
        bowl.loss().backward()
        if isinstance(optimizer, TakingHessian) and optimizer.hessian_is_due():
            optimizer.take_hessian({bowl.model.matrix: bowl.curvature})
        optimizer.step()
    assert bowl.loss().item() < 0.5 * first
