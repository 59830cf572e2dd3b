"""Retention against a state carried from position to position, in its parallel form, and against the public one."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms.retnet import MultiScaleRetention
from stability.models.position import Rope
from tests.mechanisms.checks import build_seeded, check_equals_loop, inputs
from tests.mechanisms.decay_loops import before_norm, carried, mapped, scaled, swish
from tests.mechanisms.fla_naive import fla_naive
from tests.mechanisms.oracles import rotated

TURN = Rope()


def module(turn=TURN, **settings):
    shape = MixerShape(16, 2, "causal", rope=turn)
    config = validate_settings("mechanisms", "retnet", settings)
    layer = build_seeded(lambda: MultiScaleRetention.build(config, shape)).double()
    with torch.no_grad():
        layer.norm.weight.add_(torch.linspace(-0.5, 0.5, len(layer.norm.weight)))
    return layer


def by_loops(layer, x_ND, valid_N, *, rope):
    """One sequence's output by eqs. 6 and 8, with γ of each head written out."""
    width = layer.out.in_features
    q, k, v, g = (
        mapped(layer.qkvg, x_ND, first, rows) for first, rows in ((0, 16), (16, 16), (32, width), (32 + width, width))
    )
    read = torch.zeros_like(v)
    for head, gamma in enumerate((31 / 32, 63 / 64)):
        keys, own = slice(8 * head, 8 * head + 8), slice(width // 2 * head, width // 2 * (head + 1))
        q_NK, k_NK = (rotated(u[:, keys]) if rope else u[:, keys] for u in (q, k))
        o_NV = carried(q_NK / math.sqrt(8), k_NK, v[:, own], lambda n: [gamma] * 8, valid_N)  # noqa: B023
        for n in range(len(x_ND)):
            read[n, own] = swish(g[n, own]) * scaled(o_NV[n], layer.norm.weight, centred=True)
    return read @ layer.out.weight.T + layer.out.bias


@pytest.mark.parametrize(("turn", "settings"), [(TURN, {}), (None, {"expand_v": 2.0}), (TURN, {"expand_v": 0.5})])
@pytest.mark.parametrize("num_positions", [1, 9, 27])
def test_equals_the_recurrence_position_by_position(num_positions, turn, settings):
    layer = module(turn, chunk=4, **settings)
    check_equals_loop(layer, partial(by_loops, layer, rope=turn is not None), num_positions)


def test_equals_the_public_parallel_form():
    """Of flash-linear-attention, in float32, whose γ are the same; it scales queries by 1/√K itself."""
    layer, x_BND = module(chunk=4).float(), inputs(torch.float32, num_positions=27)
    with torch.no_grad():
        q, k, v, _ = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in layer.qkvg(x_BND).chunk(4, -1))
        expected = fla_naive("retention").naive_retention(TURN(q), TURN(k), v)
        torch.testing.assert_close(before_norm(layer, x_BND), expected, rtol=1e-4, atol=1e-5)


def test_positions_enter_by_the_rotation_and_by_the_decay():
    usual, other, unturned = (module(turn)(inputs()) for turn in (TURN, Rope(50.0), None))
    assert not torch.allclose(usual, other) and not torch.allclose(usual, unturned)
    swapped_BND = inputs()[:, [1, 0, *range(2, 9)]]
    assert not torch.allclose(module(None)(swapped_BND)[:, -1], unturned[:, -1]), "the last position sees a set"


def test_decays_are_those_of_the_paper_and_stay_below_one_in_float32():
    layer = build("retnet", width=64, heads=32, direction="causal")
    expected = torch.tensor([math.log1p(-(2.0 ** (-5 - head))) for head in range(32)])
    found = layer.log_decay(torch.zeros(1, 3, 64))
    torch.testing.assert_close(found[0, :, 2, 0], expected, rtol=1e-6, atol=0)
    assert (found < 0).all()


def test_the_norm_reads_no_other_position_and_no_other_head():
    """A group norm over positions, or over all heads, would let a tenfold value of one change the others."""
    layer, x_BND = module(), inputs()
    with torch.no_grad():
        layer.out.weight.copy_(torch.eye(16))
        plain = layer(x_BND)
        layer.qkvg.weight[32:40] *= 10
        layer.qkvg.bias[32:40] *= 10
        found = layer(x_BND)
    torch.testing.assert_close(found[..., 8:], plain[..., 8:], rtol=1e-12, atol=1e-13)
    # and the head itself is normed: only ε tells the two apart
    torch.testing.assert_close(found[..., :8], plain[..., :8], rtol=0.02, atol=0.01)


def test_odd_heads_are_refused_under_rotation_only():
    shape = MixerShape(9, 3, "causal", rope=None)
    layer = MultiScaleRetention.build(validate_settings("mechanisms", "retnet", {}), shape)
    assert layer(torch.ones(1, 4, 9)).shape == (1, 4, 9)
    with pytest.raises(ValueError, match="head width 9/3 = 3 is odd"):
        build("retnet", width=9, heads=3, direction="causal")


@pytest.mark.parametrize(("settings", "expected"), [({}, 5), ({"expand_v": 2.0}, 8), ({"expand_v": 0.5}, 3.5)])
def test_widths_are_as_declared(settings, expected):
    layer, config = module(**settings), validate_settings("mechanisms", "retnet", settings)
    matrices = [value for value in layer.parameters() if value.ndim == 2]
    assert sum(value.numel() for value in matrices) == expected * 16 * 16
    assert sum(layer.own_splits["qkvg"]) == layer.qkvg.out_features
    shape, values = MixerShape(16, 2, "causal"), layer.out.in_features
    assert MultiScaleRetention.state_size(config, shape, 99) == 2 * 8 * values // 2


def test_in_bfloat16_the_state_is_kept_in_float32():
    layer, x_BND = module().float(), inputs(torch.float32, num_positions=60)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert before_norm(layer, x_BND).dtype == torch.float32
        y_BND = layer(x_BND)
    torch.testing.assert_close(y_BND.float(), layer(x_BND), rtol=0, atol=0.05)
