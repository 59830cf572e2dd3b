"""Each norm against its formula in plain Python floats, number by number."""

from __future__ import annotations

import math

import pytest
import torch

from stability.norms import build

WIDTH = 6


def layernorm(x, weight, bias, epsilon):
    mean = math.fsum(x) / len(x)
    variance = math.fsum((value - mean) ** 2 for value in x) / len(x)
    return [g * (value - mean) / math.sqrt(variance + epsilon) + b for value, g, b in zip(x, weight, bias, strict=True)]


def rmsnorm(x, weight, epsilon):
    square = math.fsum(value**2 for value in x) / len(x)
    return [g * value / math.sqrt(square + epsilon) for value, g in zip(x, weight, strict=True)]


def dyt(x, alpha, weight, bias):
    return [g * math.tanh(alpha[0] * value) + b for value, g, b in zip(x, weight, bias, strict=True)]


def derf(x, alpha, shift, weight, bias):
    return [g * math.erf(alpha[0] * value + shift[0]) + b for value, g, b in zip(x, weight, bias, strict=True)]


CASES = {
    "layernorm": (layernorm, {"epsilon": 1e-2}),
    "rmsnorm": (rmsnorm, {"epsilon": 1e-2}),
    "dyt": (dyt, {}),
    "derf": (derf, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_norm_is_its_formula(name):
    formula, settings = CASES[name]
    module, generator = build(name, width=WIDTH, **settings).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x_ND = 3 * torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)
    own = {key: parameter.tolist() for key, parameter in module.named_parameters()}
    expected = torch.tensor([formula(row, **own, **settings) for row in x_ND.tolist()], dtype=torch.float64)
    torch.testing.assert_close(module(x_ND), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("layernorm", {"weight": [1.0] * WIDTH, "bias": [0.0] * WIDTH}),
        ("rmsnorm", {"weight": [1.0] * WIDTH}),
        ("dyt", {"alpha": [0.25], "weight": [1.0] * WIDTH, "bias": [0.0] * WIDTH}),
        ("derf", {"alpha": [0.25], "shift": [0.125], "weight": [1.0] * WIDTH, "bias": [0.0] * WIDTH}),
    ],
)
def test_parameters_start_where_they_should(name, start):
    settings = {key: start[key][0] for key in ("alpha", "shift") if key in start}
    found = {key: value.tolist() for key, value in build(name, width=WIDTH, **settings).named_parameters()}
    assert found == start


def test_a_layernorm_without_bias_has_a_gain_alone():
    assert [key for key, _ in build("layernorm", width=WIDTH, bias=False).named_parameters()] == ["weight"]
