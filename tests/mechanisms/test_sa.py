from __future__ import annotations

import pytest
import torch

from stability.config import settings_of
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms.sa import SoftmaxAttention
from tests.mechanisms.checks import build_seeded, inputs, padding
from tests.mechanisms.oracles import softmax_attention


def module(direction: str) -> torch.nn.Module:
    return build_seeded(lambda: build("sa", width=16, heads=2, direction=direction)).double()


def visible(direction: str, mask_BN: torch.Tensor) -> torch.Tensor:
    visible_BNN = mask_BN[:, None].expand(-1, mask_BN.shape[1], -1)
    return visible_BNN.tril() if direction == "causal" else visible_BNN


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
def test_equals_explicit_softmax(direction):
    x_BND, layer = inputs(), module(direction)
    expected = softmax_attention(layer, x_BND, visible(direction, torch.ones(x_BND.shape[:2], dtype=torch.bool)))
    torch.testing.assert_close(layer(x_BND), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(layer.float()(x_BND.float()), expected.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
def test_equals_explicit_softmax_over_valid_keys(direction):
    x_BND, mask_BN, layer = inputs(), padding(), module(direction)
    expected = softmax_attention(layer, x_BND, visible(direction, mask_BN))
    torch.testing.assert_close(layer(x_BND, mask_BN=mask_BN)[mask_BN], expected[mask_BN], rtol=0, atol=1e-10)


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
def test_a_mask_without_padding_changes_nothing(direction):
    x_BND, layer = inputs(), module(direction)
    torch.testing.assert_close(layer(x_BND, mask_BN=torch.ones(x_BND.shape[:2], dtype=torch.bool)), layer(x_BND), rtol=0, atol=1e-12)


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
def test_no_query_is_left_without_a_key(direction):
    mask_BN = padding()
    mask_BN[2] = False
    assert module(direction)._visible(mask_BN).any(-1).all()


def test_has_four_projections_with_bias():
    assert sum(parameter.numel() for parameter in module("causal").parameters()) == 4 * (16 * 16 + 16)


def test_cost_is_what_the_flop_counter_counts():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    layer = module("bidirectional").float()
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        layer(torch.zeros(1, 32, 16))
    assert counter.get_total_flops() == 2 * SoftmaxAttention.cost(settings_of("mechanisms", "sa", {}), MixerShape(16, 2), 32)
