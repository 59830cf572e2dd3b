"""Gated linear attention against a state carried from position to position, and against the public recurrence."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms.gla import GatedLinearAttention
from stability.models.init import initialise
from stability.models.position import Rope
from tests.mechanisms.checks import build_seeded, check_equals_loop, inputs
from tests.mechanisms.decay_loops import before_norm, carried, convolved, mapped, scaled, sigmoid, swish
from tests.mechanisms.fla_naive import fla_naive
from tests.mechanisms.small import OTHER

VARIED = OTHER["gla"][0]


def module(**settings):
    config, shape = validate_settings("mechanisms", "gla", settings), MixerShape(16, 2, "causal")
    layer = build_seeded(lambda: GatedLinearAttention.build(config, shape)).double()
    with torch.no_grad():
        layer.norm.weight.add_(torch.linspace(-0.5, 0.5, len(layer.norm.weight)))
        layer.forget.weight.mul_(8)  # decays from 0.7 to nearly 1
        layer.forget.bias.add_(torch.linspace(-3, 3, len(layer.forget.bias)))
    return layer


def by_loops(layer, x_ND, valid_N, *, divisor):
    """One sequence's output: S ← Diag(α) S + k vᵀ, α = σ(W₂ W₁ x + b)^(1/τ) by powers and no logarithms."""
    of_keys, of_values = len(layer.forget.bias), layer.out.in_features
    rows = (of_keys, of_keys, of_values, of_values)
    q, k, v, g = (mapped(layer.qkvg, x_ND, sum(rows[:part]), rows[part]) for part in range(4))
    if layer.conv is not None:
        turned = convolved(torch.cat((q, k, v), -1), layer.conv.weight, valid_N)
        q, k, v = turned.split(rows[:3], -1)
    scores = mapped(layer.forget, mapped(layer.forget_down, x_ND, 0, len(layer.forget_down.weight)), 0, of_keys)
    alpha = [[sigmoid(score) ** (1 / divisor) for score in row] for row in scores.tolist()]
    read = torch.zeros_like(v)
    for head in range(2):
        keys = slice(of_keys // 2 * head, of_keys // 2 * (head + 1))
        own = slice(of_values // 2 * head, of_values // 2 * (head + 1))
        q_NK = q[:, keys] / math.sqrt(of_keys // 2)
        o_NV = carried(q_NK, k[:, keys], v[:, own], lambda n: alpha[n][keys], valid_N)  # noqa: B023
        for n in range(len(x_ND)):
            read[n, own] = swish(g[n, own]) * scaled(o_NV[n], layer.norm.weight, centred=False)
    return read @ layer.out.weight.T + layer.out.bias


@pytest.mark.parametrize(("settings", "divisor"), [({}, 16), ({"conv": 4}, 16), (VARIED, 2)])
@pytest.mark.parametrize("num_positions", [1, 9, 27])
def test_equals_the_recurrence_position_by_position(num_positions, settings, divisor):
    layer = module(**{"chunk": 4, **settings})
    check_equals_loop(layer, partial(by_loops, layer, divisor=divisor), num_positions)


@pytest.mark.parametrize("conv", [None, 4])
def test_equals_the_public_recurrence(conv):
    """Of flash-linear-attention, in float32; it scales queries by 1/√K itself. The convolution is torch's."""
    layer, x_BND = module(chunk=4, conv=conv).float(), inputs(torch.float32, num_positions=27)
    with torch.no_grad():
        qkv_BND = layer.qkvg(x_BND)[..., :32]
        if conv is not None:
            padded_BDM = F.pad(qkv_BND.mT, (conv - 1, 0))
            qkv_BND = F.silu(F.conv1d(padded_BDM, layer.conv.weight, groups=32)).mT
        q, k, v = (part.unflatten(-1, (2, -1)) for part in qkv_BND.split([8, 8, 16], -1))
        scores = layer.forget(layer.forget_down(x_BND)).unflatten(-1, (2, -1))
        expected, _ = fla_naive("gla").naive_recurrent_gla(q, k, v, scores.sigmoid().log() / 16)
        torch.testing.assert_close(before_norm(layer, x_BND), expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_a_decay_is_of_a_feature_of_the_keys():
    """With all of the first head's first key feature forgotten, what it read there is gone, and no value is."""
    layer, x_BND = module(), inputs()
    with torch.no_grad():
        layer.forget.weight.zero_()
        layer.forget.bias.fill_(80.0)
        layer.forget.bias[0] = -2000.0
        q, k, v, _ = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in layer.qkvg(x_BND).split([8, 8, 16, 16], -1)
        )
        found = before_norm(layer, x_BND)
        scores = torch.stack([q[:, :, :, feature, None] * k[:, :, None, :, feature] for feature in range(4)], -1)
        scores[:, 0, :, :, 0] *= torch.eye(9, dtype=torch.float64)
        expected = scores.sum(-1).tril() @ v / 2
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_convolution_of_one_position_and_weight_one_is_the_swish_of_the_projections():
    """Of queries, keys and values, and not of the gates."""
    layer, x_BND = module(conv=1), inputs()
    with torch.no_grad():
        layer.conv.weight.fill_(1.0)
        given = layer.qkvg(x_BND)
        q, k, v, g = layer.project(x_BND, None)
    assert torch.equal(g, given[..., 32:])
    assert torch.equal(torch.cat((q, k, v), -1), F.silu(given[..., :32]))


def test_the_runs_positions_do_not_matter():
    config = validate_settings("mechanisms", "gla", {})
    outputs = [
        build_seeded(lambda: GatedLinearAttention.build(config, MixerShape(16, 2, "causal", rope=rope)))(  # noqa: B023
            inputs(torch.float32)
        )
        for rope in (Rope(), None)
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize(("settings", "expected"), [({}, 4), ({"expand_k": 1.0}, 5), ({"expand_v": 2.0, "conv": 3}, 7)])
def test_widths_are_as_declared(settings, expected):
    layer, config = module(**settings), validate_settings("mechanisms", "gla", settings)
    assert layer.qkvg.weight.numel() + layer.out.weight.numel() == expected * 16 * 16
    assert sum(layer.own_splits["qkvg"]) == layer.qkvg.out_features
    of_keys, of_values = len(layer.forget.bias), layer.out.in_features
    held = 0 if layer.conv is None else 2 * (2 * of_keys + of_values)
    assert GatedLinearAttention.state_size(config, MixerShape(16, 2, "causal"), 99) == of_keys * of_values // 2 + held


def test_a_head_that_its_share_does_not_divide_is_rounded():
    layer = build("gla", width=12, heads=2, direction="causal", expand_k=0.1, expand_v=0.45)
    assert layer.widths == (2, 2, 6, 6)


@pytest.mark.parametrize("rule", ["ours", "torch", "nanogpt", "sedd"])
def test_gates_begin_where_they_keep_most_under_every_rule(rule):
    layer = build_seeded(lambda: build("gla", width=16, heads=2, direction="causal"))
    initialise(nn.ModuleDict({"mixer": layer}), 4, rule=rule)
    found = layer.log_decay(torch.zeros(1, 2, 16)).exp()
    torch.testing.assert_close(found, torch.full_like(found, 0.5 ** (1 / 16)), rtol=1e-6, atol=0)


def test_cost_of_a_convolution_is_its_taps_of_each_query_key_and_value():
    shape = MixerShape(16, 2, "causal")
    without, with_conv = (
        GatedLinearAttention.cost(validate_settings("mechanisms", "gla", {"conv": conv}), shape, 30)
        for conv in (None, 3)
    )
    assert with_conv - without == 3 * 30 * (8 + 8 + 16)


def test_in_bfloat16_decays_and_state_are_those_of_float32():
    layer, x_BND = module().float(), inputs(torch.float32, num_positions=60)
    expected = layer.log_decay(x_BND)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.log_decay(x_BND), expected) and before_norm(layer, x_BND).dtype == torch.float32
        y_BND = layer(x_BND)
    torch.testing.assert_close(y_BND.float(), layer(x_BND), rtol=0, atol=0.1)
