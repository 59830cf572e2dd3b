"""Forgetting attention against a loop over every gate between two positions, and against `sa` with nothing
forgotten."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from stability.build import build_model
from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms.fox import ForgettingAttention
from stability.models.init import initialise
from stability.models.position import Rope
from tests.mechanisms.checks import build_seeded, check_equals_loop, inputs, padding
from tests.mechanisms.oracles import rotated

TURN = Rope()


def module(turn=TURN, **settings):
    shape = MixerShape(16, 2, "causal", rope=turn)
    layer = build_seeded(
        lambda: ForgettingAttention.build(validate_settings("mechanisms", "fox", settings), shape)
    ).double()
    with torch.no_grad():
        layer.forget.bias.add_(torch.tensor([0.3, 2.0]))
        layer.forget.weight.mul_(3)
    return layer


def by_loops(layer, x_ND, valid_N, *, rope):
    """One sequence's output: Σ_{j ≤ i} Π_{l = j+1..i} f_l e^(q_i·k_j/√K) v_j over the same sum of weights, with one
    factor f_l for each valid position between; no logarithm, no cumulative sum."""
    width, head_width = x_ND.shape[1], x_ND.shape[1] // layer.heads
    q, k, v = (
        x_ND @ layer.qkv.weight[row : row + width].T + layer.qkv.bias[row : row + width]
        for row in (0, width, 2 * width)
    )
    attended = torch.zeros_like(v)
    for head in range(layer.heads):
        part = slice(head * head_width, (head + 1) * head_width)
        q_NK, k_NK = (rotated(u[:, part]) if rope else u[:, part] for u in (q, k))
        scores = [float(layer.forget.weight[head] @ x_D + layer.forget.bias[head]) for x_D in x_ND]
        kept = [1 / (1 + math.exp(-score)) if valid else 1 for score, valid in zip(scores, valid_N, strict=True)]
        for i in range(len(x_ND)):
            weights = {}
            for j in range(i + 1):
                if valid_N[j]:
                    weight = math.exp(float(q_NK[i] @ k_NK[j]) / math.sqrt(head_width))
                    for between in range(j + 1, i + 1):
                        weight *= kept[between]
                    weights[j] = weight
            for j, weight in weights.items():
                attended[i, part] += weight / sum(weights.values()) * v[j, part]
    return attended @ layer.out.weight.T + layer.out.bias


@pytest.mark.parametrize("settings", [{}, {"rope": "absolute"}, {"decay_times": (2, 8)}])
@pytest.mark.parametrize("num_positions", [1, 9, 17, 40])
def test_equals_a_loop_over_the_gates_between_two_positions(num_positions, settings):
    layer = module(**settings)
    check_equals_loop(layer, partial(by_loops, layer, rope="rope" in settings), num_positions)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rope", ["none", "absolute"])
def test_where_nothing_is_forgotten_it_is_sa(rope, padded):
    layer = module(rope=rope)
    shape = MixerShape(16, 2, "causal", rope=Rope() if rope == "absolute" else None)
    attention = type(build("sa", width=16, heads=2)).build(validate_settings("mechanisms", "sa", {}), shape).double()
    attention.load_state_dict({key: value for key, value in layer.state_dict().items() if "forget" not in key})
    mask_BN = padding() if padded else torch.ones_like(padding())
    expected = attention(inputs(), mask_BN=mask_BN if padded else None)[mask_BN]
    with torch.no_grad():
        layer.forget.weight.mul_(1e-3)
        layer.forget.bias.fill_(5.0)
        assert not torch.allclose(layer(inputs(), mask_BN=mask_BN)[mask_BN], expected, rtol=0, atol=1e-5)
        layer.forget.bias.fill_(60.0)
    torch.testing.assert_close(layer(inputs(), mask_BN=mask_BN)[mask_BN], expected, rtol=1e-10, atol=1e-12)


def test_where_all_is_forgotten_each_position_reads_its_own_value():
    layer = module()
    with torch.no_grad():
        layer.forget.weight.zero_()
        layer.forget.bias.fill_(-80.0)
    torch.testing.assert_close(layer(inputs()), layer.out(layer.qkv(inputs())[..., 32:]), rtol=1e-10, atol=1e-12)


def test_the_gates_tell_positions_apart_and_the_runs_positions_do_not():
    usual, unturned, other = (module(turn)(inputs()) for turn in (Rope(), None, Rope(50.0)))
    assert torch.equal(usual, unturned) and torch.equal(usual, other)
    turned = [module(turn, rope="absolute")(inputs()) for turn in (Rope(), None, Rope(50.0))]
    assert torch.equal(turned[1], usual)
    assert not torch.allclose(turned[0], usual) and not torch.allclose(turned[0], turned[2])
    mixed_BND = inputs()[:, [1, 0, *range(2, 9)]]
    assert not torch.allclose(module()(mixed_BND)[:, -1], usual[:, -1]), "the last position sees a set"


def test_a_gate_between_is_a_factor_of_the_weights_quotient():
    """A_i,j+1 / A_ij without scores is 1/f_{j+1}, whatever comes after."""
    layer = module()
    with torch.no_grad():
        layer.qkv.weight[:32] = 0
        layer.qkv.bias[:32] = 0
        a_BHNN = layer.weights(inputs())
        f_BHN = torch.sigmoid(layer.forget(inputs())).transpose(1, 2)
    for i in range(2, 9):
        quotient = a_BHNN[:, :, i, : i - 1] / a_BHNN[:, :, i, 1:i]
        torch.testing.assert_close(quotient, f_BHN[:, :, 1:i], rtol=1e-10, atol=0)


def test_odd_heads_are_refused_under_rotation_only():
    assert build("fox", width=9, heads=3, direction="causal")(torch.ones(1, 4, 9)).shape == (1, 4, 9)
    with pytest.raises(ValueError, match="head width 9/3 = 3 is odd"):
        build("fox", width=9, heads=3, direction="causal", rope="absolute")


@pytest.mark.parametrize("rule", ["ours", "torch", "nanogpt", "sedd"])
def test_gates_begin_at_one_half_or_as_their_times_say_under_every_rule(rule):
    for settings, heads, expected in (
        ({}, 4, [0.5] * 4),
        ({"decay_times": (2, 128)}, 4, [math.exp(-1 / t) for t in (2, 8, 32, 128)]),
        ({"decay_times": (16, 4)}, 2, [math.exp(-1 / 16), math.exp(-1 / 4)]),
        ({"decay_times": (3, 50)}, 1, [math.exp(-1 / 3)]),
    ):
        layer = build_seeded(lambda: build("fox", width=16, heads=heads, direction="causal", **settings))  # noqa: B023
        initialise(nn.ModuleDict({"mixer": layer}), 4, rule=rule)
        torch.testing.assert_close(layer.forget.bias.sigmoid(), torch.tensor(expected), rtol=1e-6, atol=0)
        assert layer.own_decay == {"forget.bias": False} and layer.forget.weight.any()


def test_a_model_without_biases_keeps_those_of_the_gates(lab):
    model = {"name": "x", "layers": 2, "width": 16, "heads": 2, "positions": 16, "mixer_bias": "none"}
    spec = lab.spec(objective="ar", mechanism={"name": "fox", "decay_times": [4, 4]}, model=model)
    for block in build_model(spec, 8).blocks:
        assert block.mixer.qkv.bias is None
        torch.testing.assert_close(block.mixer.forget.bias.sigmoid(), torch.full((2,), math.exp(-1 / 4)))


def test_rows_that_see_nothing_pass_no_nan_on():
    """It would be masked later, and the output be right; whoever looks for the first NaN of a backward pass finds it."""
    layer, x_BND, mask_BN = module(), inputs().requires_grad_(), padding()
    mask_BN[2] = False
    with torch.autograd.set_detect_anomaly(True):
        (gradient_BND,) = torch.autograd.grad(layer(x_BND, mask_BN=mask_BN).square().sum(), x_BND)
    assert gradient_BND.isfinite().all() and not layer.weights(x_BND, mask_BN=mask_BN)[2].any()


def test_long_sequences_that_forget_much_stay_finite_and_exact_in_float32():
    """D is −2,000 from end to end, and +2,000 towards the future, where e^D is no float32."""
    layer = module(decay_times=(0.25, 64)).double()
    x_BND = torch.randn(1, 700, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert layer.decay(x_BND, None)[0, 0, -1, 0] < -1500
        expected = layer(x_BND)
        found = layer.float()(x_BND.float())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    y_BND = layer(x_BND.float())
    assert all(g.isfinite().all() for g in torch.autograd.grad(y_BND.square().sum(), list(layer.parameters())))


def test_in_bfloat16_what_is_forgotten_is_counted_in_float32():
    """Rounded to 8 bits, D of −100 would be off by up to 0.25, a quarter of a weight."""
    layer, x_BND = module(decay_times=(0.5, 8)).float(), inputs(torch.float32, num_positions=60)
    expected = layer.decay(x_BND, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, a_BHNN, y_BND = layer.decay(x_BND, None), layer.weights(x_BND), layer(x_BND)
    assert expected.min() < -100 and torch.equal(found, expected)
    assert a_BHNN.dtype == torch.float32 and y_BND.isfinite().all()
    torch.testing.assert_close(a_BHNN, layer.weights(x_BND), rtol=0, atol=0.02)


def test_begins_local_under_rotation_only():
    for rope, expected in (("absolute", 2.0), ("none", 0.0)):
        layer = build("fox", width=16, heads=2, direction="causal", rope=rope)
        nn.init.zeros_(layer.qkv.bias)
        layer.start_local(2.0)
        assert (layer.qkv.bias[:32] == expected).all() and not layer.qkv.bias[32:].any()
