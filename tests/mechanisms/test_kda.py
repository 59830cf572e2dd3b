"""Kimi Delta Attention against its recurrence written out and against the released slow reference."""

from __future__ import annotations

import torch
from torch import nn

from tests.mechanisms.checks import inputs
from tests.mechanisms.delta_loops import module


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
