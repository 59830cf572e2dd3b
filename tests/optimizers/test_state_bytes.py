"""Bytes of state per parameter of every registered optimizer, as its rule needs them: numbers that it keeps of a matrix
and of a vector, four bytes each."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from stability.optimizers import build, state_bytes
from stability.registry import Registry
from tests.optimizers.checks import give_hessian

Shape = tuple[int, ...]
SHAPES: dict[str, Shape] = {"wide": (64, 256), "tall": (256, 64), "square": (128, 128), "vector": (64,)}


def each(count: int) -> Callable[[Shape], int]:
    """So many numbers for each entry."""
    return lambda shape: count * math.prod(shape)


def of_matrices(numbers: Callable[[int, int], int]) -> Callable[[Shape], int]:
    """These of a matrix, from its shorter and its longer side, and AdamW's two means of all else."""
    return lambda shape: numbers(*sorted(shape)) if len(shape) == 2 else 2 * math.prod(shape)


NUMBERS: dict[str, Callable[[Shape], int]] = {
    "adafactor": lambda shape: sum(shape),
    "adamw": each(2),
    "adan": each(4),
    "ademamix": each(3),
    "adopt": each(2),
    "cautious_adamw": each(2),
    # a quarter of the shorter side: its directions, and two means of what is projected
    "galore_adamw": of_matrices(lambda short, long: short // 4 * (short + 2 * long)),
    "lamb": each(2),
    "lion": each(1),
    "mars_adamw": each(3),
    "muon": of_matrices(lambda short, long: short * long),
    "prodigy": each(4),
    "radam": each(2),
    "schedulefree_adamw": each(2),
    "set_adam": each(2),
    "sgd": each(1),
    "shampoo": of_matrices(lambda short, long: short**2 + long**2),
    # two means, and of each side a factor and its eigenbasis
    "soap": of_matrices(lambda short, long: 2 * short * long + 2 * (short**2 + long**2)),
    "sophia": each(2),
    "stable_adamw": each(2),
    "turbo_muon": of_matrices(lambda short, long: short * long),
}
SETTINGS = {"sgd": {"momentum": 0.9}}


class Matrices(nn.Module):
    """Matrices large enough for a count of steps, or a norm, to be nothing beside them."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0))))


@pytest.mark.parametrize("name", Registry("optimizers").names())
def test_state_is_what_the_rule_needs(name):
    assert name in NUMBERS, f"{name}: how many numbers does its rule keep of a tensor? add it to NUMBERS"
    model = Matrices()
    optimizer = build(name, model, lr=1e-3, **SETTINGS.get(name, {}))
    for _ in range(2):
        for value in model.parameters():
            value.grad = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
        give_hessian(optimizer, model)
        optimizer.step()
    expected = 4 * sum(map(NUMBERS[name], SHAPES.values())) / sum(map(math.prod, SHAPES.values()))
    assert state_bytes(optimizer) == pytest.approx(expected, abs=0.01)


def test_what_stands_in_two_places_counts_once_and_plain_numbers_nothing():
    value, mean = nn.Parameter(torch.zeros(10)), torch.zeros(5, dtype=torch.float64)
    optimizer = torch.optim.SGD([value], lr=1.0)
    assert state_bytes(optimizer) == 0
    optimizer.state[value] = {"mean": mean, 0: {"again": mean, "step": 3}, "factors": [torch.zeros(2), [], None]}
    assert state_bytes(optimizer) == (5 * 8 + 2 * 4) / 10
