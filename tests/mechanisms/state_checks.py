"""What a sequence leaves behind for what comes after it, measured without the mechanism's own word: which positions
later ones look at, and on how many independent numbers of the past the later outputs depend."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from stability.mechanisms import AbstractAttention, MixerShape
from stability.mechanisms._recurrent import ShortConvolution
from tests.mechanisms.checks import HEADS, WIDTH, inputs

SHAPE = MixerShape(WIDTH, HEADS, "causal")
LATER = 60  # positions that follow: enough for all that a window, a block or a stride of the tests reaches
ROUNDING = 1e-15  # of singular values in float64, over the largest


def pairs_looked_at(module: AbstractAttention, num_read: int) -> int:
    """Return how many pairs of a map and a position among the first ``num_read`` have a weight in a later row."""
    with torch.no_grad():
        a_BHNN = module.double().weights(inputs(num_positions=num_read + LATER))
    return int((a_BHNN[:, :, num_read:, :num_read] != 0).any(2).any(0).sum())


def positions_felt(module: nn.Module, num_read: int) -> int:
    """Return to how many of the first ``num_read`` positions a later output has a gradient."""
    x_BND = inputs(num_positions=num_read + LATER).requires_grad_()
    (gradient_BND,) = torch.autograd.grad(module.double()(x_BND)[:, num_read:].sin().sum(), x_BND)
    return int((gradient_BND[:, :num_read] != 0).any(-1).any(0).sum())


def recurrent_numbers(module: nn.Module, expected: int) -> int:
    """Return how many numbers a recurrent mechanism carries from a sequence into what follows it: the inputs that its
    short convolutions still hold, counted from their weights, and the rank of the map from what lies further back to
    the later outputs, at a point drawn at random. ``expected``: how long a sequence is taken goes by it."""
    convolutions = [part.weight for part in module.modules() if isinstance(part, ShortConvolution)]
    held = max((weight.shape[2] - 1 for weight in convolutions), default=0)
    rank = rank_of_the_past(module, held, math.ceil(1.5 * expected / WIDTH) + 4)
    return rank + sum(weight.shape[0] * (weight.shape[2] - 1) for weight in convolutions)


def rank_of_the_past(module: nn.Module, held: int, num: int) -> int:
    """Return the rank of d(``num`` later outputs) / d(``num`` inputs that lie ``held`` and more before them)."""
    x_BND = inputs(num_positions=2 * num + held)[:1]
    module = module.double()

    def later(past_BND: Tensor) -> Tensor:
        return module(torch.cat([past_BND, x_BND[:, num:]], 1))[:, num + held :].flatten()

    jacobian: Any = torch.autograd.functional.jacobian(later, x_BND[:, :num], vectorize=True)
    values = torch.linalg.svdvals(jacobian.flatten(1))
    above = int((values > ROUNDING * values[0]).sum())
    return int((values[:above] / values[1 : above + 1]).argmax()) + 1  # where they fall to rounding at once
