"""DeltaNet against its recurrence written out and against the released slow reference."""

from __future__ import annotations

import math

import pytest
import torch

from stability.mechanisms._delta_rule import delta_rule
from tests.mechanisms.checks import inputs
from tests.mechanisms.delta_loops import assert_is_by_loops, module
from tests.mechanisms.fla_naive import fla_naive
from tests.within import assert_within


@pytest.mark.parametrize("settings", [{}, {"chunk": 32}, {"expand_v": 2, "conv": 2}])
def test_it_is_the_recurrence_written_out(settings):
    assert_is_by_loops("deltanet", **settings)


def test_strengths_up_to_two_are_of_the_setting():
    assert_is_by_loops("deltanet", most=2.0, negative_eigenvalues=True)
    with pytest.raises(AssertionError, match="relative error"):
        assert_is_by_loops("deltanet", most=1.0, negative_eigenvalues=True)


def test_its_state_map_is_that_of_the_released_reference():
    layer = module("deltanet", chunk=8).float()
    q, k, v, beta, _ = layer.written_and_read(inputs(torch.float32, num_positions=40), None)
    expected, _ = fla_naive("delta_rule").delta_rule_recurrence(q * math.sqrt(8), k, v, beta)
    found = delta_rule(q, k, v, beta, chunk=8)
    assert_within((found - expected).norm(), 1e-4 * expected.norm())


def test_without_gates_it_has_as_many_weights_as_attention_but_for_strengths_and_convolution():
    layer = module("deltanet")
    counts = {key: value.numel() for key, value in layer.named_parameters()}
    assert counts == {
        "qkv.weight": 3 * 16 * 16,
        "conv.weight": 4 * 48,
        "beta.weight": 2 * 16,
        "norm.weight": 8,
        "out.weight": 16 * 16,
        "out.bias": 16,
    }
