"""Kimi Delta Attention against its recurrence written out and against the released slow reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stability.mechanisms import build
from stability.mechanisms._delta_rule import delta_rule
from stability.models.init import initialise
from tests.mechanisms.checks import build_seeded, inputs
from tests.mechanisms.delta_loops import assert_is_by_loops, module
from tests.mechanisms.fla_naive import fla_naive
from tests.within import assert_within


@pytest.mark.parametrize("settings", [{}, {"chunk": 32}, {"expand_v": 2, "conv": 2}])
def test_it_is_the_recurrence_written_out(settings):
    assert_is_by_loops("kda", **settings)


def test_strengths_up_to_two_are_of_the_setting():
    assert_is_by_loops("kda", most=2.0, negative_eigenvalues=True)


def test_its_state_map_is_that_of_the_released_reference():
    layer = module("kda", chunk=8).float()
    q, k, v, beta, g = layer.written_and_read(inputs(torch.float32, num_positions=40), None)
    across = [x.transpose(1, 2) for x in (q, k, v, g, beta)]
    expected = fla_naive("kda").naive_recurrent_kda(*across, scale=1.0)[0].transpose(1, 2)
    found = delta_rule(q, k, v, beta, g, chunk=8)
    assert_within((found - expected).norm(), 1e-4 * expected.norm())


def test_a_layer_that_forgets_much_stays_finite_and_exact_in_float32():
    """Some features forget by e^−96 and more within a chunk, beside others that keep."""
    layer, x_BND = module("kda"), inputs(num_positions=100)
    with torch.no_grad():
        layer.A_log.add_(4.0)
        layer.dt_bias.mul_(3.0)
        layer.decay_up.weight.mul_(3.0)
        log_decay = layer.log_decay(x_BND)
        assert log_decay[:, :32].sum(1).min() < -800 and log_decay[:, :32].sum(1).max() > -32
        expected = layer(x_BND)
    layer = layer.float()
    y_BND = layer(x_BND.float())
    torch.testing.assert_close(y_BND.double(), expected, rtol=0, atol=1e-3 * float(expected.abs().max()))
    assert all(g.isfinite().all() for g in torch.autograd.grad(y_BND.square().sum(), list(layer.parameters())))


def test_each_feature_of_the_keys_has_a_decay_of_its_own():
    layer = module("kda")
    log_decay = layer.log_decay(inputs())
    assert log_decay.shape == (3, 9, 2, 8) and (log_decay < 0).all()
    assert (log_decay.std(-1) > 1e-3).all()


@pytest.mark.parametrize("rule", ["ours", "torch", "nanogpt", "sedd"])
def test_decays_begin_as_released_under_every_rule(rule):
    layer: Any = build_seeded(lambda: build("kda", width=512, heads=256, direction="causal"))
    initialise(nn.ModuleDict({"mixer": layer}), 4, rule=rule)
    rates, steps = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert 1 <= rates.min() < 1.5 and 15 < rates.max() <= 16 and layer.A_log.shape == (256,)
    assert 0.00099 < steps.min() < 0.0012 and 0.085 < steps.max() < 0.101 and layer.dt_bias.shape == (512,)


def test_gates_have_the_head_width_between_their_two_maps():
    layer = module("kda", expand_v=2)
    shapes = {name: tuple(part.weight.shape) for name, part in layer.named_modules() if isinstance(part, nn.Linear)}
    assert shapes == {
        "qkv": (64, 16),
        "beta": (2, 16),
        "decay_down": (8, 16),
        "decay_up": (16, 8),
        "gate_down": (8, 16),
        "gate_up": (32, 8),
        "out": (16, 32),
    }
    assert layer.gate_up.bias is not None and layer.decay_up.bias is None
