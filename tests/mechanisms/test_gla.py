"""Gated linear attention against a state carried from position to position, and against the public recurrence."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stability.config.parts import settings_of
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms.gla import GatedLinearAttention
from stability.models.init import initialise
from stability.models.position import Rope
from tests.mechanisms import checks
from tests.mechanisms.checks import build_seeded, inputs
from tests.mechanisms.decay_loops import before_norm, carried, convolved, mapped, scaled, sigmoid, swish
from tests.mechanisms.fla_naive import fla_naive
from tests.mechanisms.sight_checks import scattered_padding

VARIED = {"expand_k": 1.0, "expand_v": 2.0, "gate_rank": 3, "gate_divisor": 2.0, "conv": 3}


def module(**settings):
    config, shape = settings_of("mechanisms", "gla", settings), MixerShape(16, 2, "causal")
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
    layer, x_BND = module(chunk=4, **settings), inputs(num_positions=num_positions)
    with torch.no_grad():
        for mask_BN in (None, scattered_padding(num_positions)):
            valid_BN = torch.ones(3, num_positions, dtype=torch.bool) if mask_BN is None else mask_BN
            found = layer(x_BND, mask_BN=mask_BN)
            for b in range(3):
                expected = by_loops(layer, x_BND[b], valid_BN[b].tolist(), divisor=divisor)
                torch.testing.assert_close(found[b][valid_BN[b]], expected[valid_BN[b]], rtol=1e-10, atol=1e-12)


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


def test_the_chunk_changes_nothing():
    x_BND, mask_BN = inputs(num_positions=27), scattered_padding(27)
    expected = module(chunk=1)(x_BND, mask_BN=mask_BN)
    for chunk in (2, 8, 27, 64):
        torch.testing.assert_close(module(chunk=chunk)(x_BND, mask_BN=mask_BN), expected, rtol=1e-10, atol=1e-12)


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
        q, k, v, g = layer.projected(x_BND, None)
    assert torch.equal(g, given[..., 32:])
    assert torch.equal(torch.cat((q, k, v), -1), F.silu(given[..., :32]))


def test_padding_anywhere_is_as_if_it_were_not_there():
    layer, x_BND = module(chunk=4), inputs(num_positions=7)
    alone = layer(x_BND)
    for places in (range(7), range(4, 11), [0, 1, 5, 6, 7, 9, 10], [2, 3, 4, 8, 9, 10, 11]):
        padded, mask_BN = torch.full((3, 12, 16), 9.0, dtype=torch.float64), torch.zeros(3, 12, dtype=torch.bool)
        padded[:, list(places)], mask_BN[:, list(places)] = x_BND, True
        found = layer(padded, mask_BN=mask_BN)[:, list(places)]
        torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-12)


def test_the_runs_positions_do_not_matter():
    config = settings_of("mechanisms", "gla", {})
    outputs = [
        build_seeded(lambda: GatedLinearAttention.build(config, MixerShape(16, 2, "causal", rope=rope)))(  # noqa: B023
            inputs(torch.float32)
        )
        for rope in (Rope(), None)
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize(("settings", "expected"), [({}, 4), ({"expand_k": 1.0}, 5), ({"expand_v": 2.0, "conv": 3}, 7)])
def test_widths_are_as_declared(settings, expected):
    layer, config = module(**settings), settings_of("mechanisms", "gla", settings)
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


def test_keeps_the_contract_with_other_settings():
    for check in (
        checks.check_padding_is_unread,
        checks.check_second_derivatives,
        checks.check_future_is_unseen,
        checks.check_past_is_seen,
    ):
        check(module(chunk=2, **VARIED))


@pytest.mark.parametrize(("num_positions", "chunk"), [(32, 8), (30, 8), (5, 8)])
def test_cost_is_what_the_flop_counter_counts_and_the_scores_that_are_no_matrix_product(num_positions, chunk):
    layer = module(chunk=chunk).float()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.zeros(1, num_positions, 16))
    config = settings_of("mechanisms", "gla", {"chunk": chunk})
    cost = GatedLinearAttention.cost(config, MixerShape(16, 2, "causal"), num_positions)
    chunk = min(chunk, num_positions)
    scores = math.ceil(num_positions / chunk) * chunk * chunk * 8
    assert counter.get_total_flops() == 2 * (cost - scores)


def test_cost_of_a_convolution_is_its_taps_of_each_query_key_and_value():
    shape = MixerShape(16, 2, "causal")
    without, with_conv = (
        GatedLinearAttention.cost(settings_of("mechanisms", "gla", {"conv": conv}), shape, 30) for conv in (None, 3)
    )
    assert with_conv - without == 3 * 30 * (8 + 8 + 16)


def test_in_bfloat16_decays_and_state_are_those_of_float32():
    layer, x_BND = module().float(), inputs(torch.float32, num_positions=60)
    expected = layer.log_decay(x_BND)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.log_decay(x_BND), expected) and before_norm(layer, x_BND).dtype == torch.float32
        y_BND = layer(x_BND)
    torch.testing.assert_close(y_BND.float(), layer(x_BND), rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expand_k": 0}, "mechanism.gla.expand_k=0: input should be greater than 0"),
        ({"gate_rank": 0}, "mechanism.gla.gate_rank=0: input should be greater than or equal to 1"),
        ({"gate_divisor": -1}, "mechanism.gla.gate_divisor=-1: input should be greater than 0"),
        ({"conv": 0}, "mechanism.gla.conv=0: input should be greater than or equal to 1"),
        ({"chunk": 0}, "mechanism.gla.chunk=0: input should be greater than or equal to 1"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_line(settings, message):
    with pytest.raises(ValueError) as caught:
        build("gla", width=16, heads=2, direction="causal", **settings)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
