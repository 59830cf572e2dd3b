"""Sigmoid attention against a loop over pairs, what n of its bias is, and that no row is normalised."""

from __future__ import annotations

import math

import pytest
import torch

from stability.build import build_model
from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms.sigmoid import SigmoidAttention
from stability.models.position import Rope
from tests.mechanisms.checks import build_seeded, inputs, padding
from tests.mechanisms.oracles import rotated

DIRECTIONS = ("bidirectional", "causal")


TURN = Rope()


def module(direction="bidirectional", num_positions=None, rope=TURN, dropout=0.0, **settings):
    """A layer at a place that knows the model's length, or not, every parameter moved off its start."""
    shape = MixerShape(16, 2, direction, rope=rope, dropout=dropout, num_positions=num_positions)
    layer = build_seeded(
        lambda: SigmoidAttention.build(validate_settings("mechanisms", "sigmoid", settings), shape)
    ).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def layer_norm(u_NK, norm):
    centred = u_NK - u_NK.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def by_loops(layer, x_ND, valid_N, n, *, causal, rope=True):
    """One sequence's output, pair by pair: Σ_j v_j / (1 + n e^(−q·k/√K)), which is σ(q·k/√K − ln n)."""
    width, head_width = x_ND.shape[1], x_ND.shape[1] // layer.heads
    q, k, v = (
        x_ND @ layer.qkv.weight[row : row + width].T + layer.qkv.bias[row : row + width]
        for row in (0, width, 2 * width)
    )
    summed = torch.zeros_like(v)
    for start in range(0, width, head_width):
        part = slice(start, start + head_width)
        q_NK, k_NK = q[:, part], k[:, part]
        if layer.q_norm is not None:
            q_NK, k_NK = layer_norm(q_NK, layer.q_norm), layer_norm(k_NK, layer.k_norm)
        if rope:
            q_NK, k_NK = rotated(q_NK), rotated(k_NK)
        for i in range(len(x_ND)):
            for j in range(i + 1 if causal else len(x_ND)):
                if valid_N[j]:
                    weight = 1 / (1 + n * math.exp(-float(q_NK[i] @ k_NK[j]) / math.sqrt(head_width)))
                    summed[i, part] += weight * v[j, part]
    if layer.norm is not None:
        summed = summed / (summed.square().mean(1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight
    return summed @ layer.out.weight.T + layer.out.bias


def assert_equals_loops(layer, x_BND, mask_BN, lengths, **how):
    valid_BN = torch.ones(x_BND.shape[:2], dtype=torch.bool) if mask_BN is None else mask_BN
    with torch.no_grad():
        found = layer(x_BND, mask_BN=mask_BN)
        for b, n in enumerate(lengths):
            expected = by_loops(layer, x_BND[b], valid_BN[b].tolist(), n, **how)
            torch.testing.assert_close(found[b][valid_BN[b]], expected[valid_BN[b]], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("num_positions", [1, 9, 17, 40])
def test_equals_a_loop_over_pairs_at_the_length_that_the_model_is_made_for(direction, num_positions):
    layer, x_BND = module(direction, num_positions=12), inputs(num_positions=num_positions)
    assert_equals_loops(layer, x_BND, None, [12] * 3, causal=direction == "causal")
    mask_BN = (torch.arange(num_positions) + torch.arange(3)[:, None]) % 3 > 0
    assert_equals_loops(layer, x_BND, mask_BN, [12] * 3, causal=direction == "causal")


@pytest.mark.parametrize(
    "settings",
    [
        {"length": 5},
        {"norm": "after"},
        {"qk_norm": "layernorm"},
        {"length": 1, "norm": "after", "qk_norm": True},  # as written in older runs
    ],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equals_a_loop_over_pairs_with_every_setting(direction, settings):
    layer = module(direction, num_positions=12, **settings)
    assert_equals_loops(
        layer, inputs(), padding(), [settings.get("length", 12)] * 3, causal=direction == "causal", rope=True
    )


def test_without_rotation_positions_are_not_told_apart():
    layer, x_BND = module(rope=None), inputs()
    assert_equals_loops(layer, x_BND, None, [9] * 3, causal=False, rope=False)
    torch.testing.assert_close(layer(x_BND.flip(1)), layer(x_BND).flip(1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_where_nobody_says_the_length_it_is_that_of_each_sequence_without_its_padding(direction):
    layer, mask_BN = module(direction), padding()
    assert mask_BN.sum(1).tolist() == [5, 6, 9]
    assert_equals_loops(layer, inputs(), mask_BN, [5, 6, 9], causal=direction == "causal")
    assert_equals_loops(layer, inputs(), None, [9] * 3, causal=direction == "causal")


@pytest.mark.parametrize("num_positions", [None, 12])
def test_padding_behind_or_before_a_sequence_changes_nothing(num_positions):
    layer, x_BND = module(num_positions=num_positions), inputs()
    alone = layer(x_BND)
    for before, behind in ((0, 4), (3, 0), (2, 3)):
        padded = torch.nn.functional.pad(x_BND, (0, 0, before, behind), value=7.0)
        mask_BN = torch.zeros(padded.shape[:2], dtype=torch.bool)
        mask_BN[:, before : before + 9] = True
        found = layer(padded, mask_BN=mask_BN)[:, before : before + 9]
        torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-12)


def test_what_a_causal_position_gives_does_not_hang_on_how_long_the_sequence_becomes():
    layer, x_BND = module("causal", num_positions=12), inputs()
    whole = layer(x_BND)
    for length in (1, 4, 8):
        torch.testing.assert_close(layer(x_BND[:, :length]), whole[:, :length], rtol=1e-10, atol=1e-12)


def test_a_model_gives_its_layers_the_length_that_it_is_trained_on(lab):
    spec = lab.spec(mechanism={"name": "sigmoid"})
    assert [block.mixer.length for block in build_model(spec, 8).blocks] == [spec.model.positions] * spec.model.layers
    own = lab.spec(mechanism={"name": "sigmoid", "length": 3})
    assert [block.mixer.length for block in build_model(own, 8).blocks] == [3] * spec.model.layers
    both = lab.spec(mechanism={"name": "two_way", "of": "sigmoid"})
    lengths = [mixer.length for block in build_model(both, 8).blocks for mixer in block.mixer.mixers]
    assert lengths == [spec.model.positions] * 2 * spec.model.layers


@pytest.mark.parametrize("num_positions", [3, 64])
def test_weights_of_scores_of_zero_sum_to_n_by_n_plus_one(num_positions):
    layer = build("sigmoid", width=16, heads=2).double()
    with torch.no_grad():
        layer.qkv.weight[:32] = 0
        layer.qkv.bias[:32] = 0
    rows = layer.weights(inputs(num_positions=num_positions)).sum(-1)
    torch.testing.assert_close(rows, torch.full_like(rows, num_positions / (num_positions + 1)), rtol=1e-12, atol=0)


def test_a_pairs_weight_does_not_depend_on_the_other_keys():
    """A softmax's does: that is what is given up."""
    layer, x_BND = module(num_positions=12), inputs()
    other_BND = x_BND.clone()
    other_BND[:, 5:] = 3.0
    found, moved = layer.weights(x_BND), layer.weights(other_BND)
    assert torch.equal(found[..., :5, :5], moved[..., :5, :5]) and not torch.equal(found, moved)
    assert not torch.allclose(found.sum(-1), torch.ones(()).double(), atol=0.05)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_is_masked_has_the_weight_zero_exactly(direction):
    a_BHNN, mask_BN = module(direction).weights(inputs(), mask_BN=padding()), padding()
    seen = mask_BN[:, None, None].expand_as(a_BHNN)
    seen = seen.tril() if direction == "causal" else seen
    assert not a_BHNN[~seen].any() and (a_BHNN[seen] > 0).all()


def test_dropped_weights_are_dropped_before_the_norm():
    layer = module(dropout=0.5, norm="after").train()
    torch.manual_seed(0)
    one, two = layer(inputs()), layer(inputs())
    assert not torch.equal(one, two) and torch.equal(layer.eval()(inputs()), layer(inputs()))
    layer.norm.weight.data.zero_()
    torch.testing.assert_close(layer.train()(inputs()), layer.out.bias.expand(3, 9, 16), rtol=0, atol=0)


def test_in_bfloat16_weights_stay_in_float32_and_small_ones_differ():
    """At n = 4,096 all weights lie about 1/4,096: rounded sums of score and bias would be 3 % off each."""
    layer, x_BND = module(num_positions=4096).float(), inputs(torch.float32)
    exact = layer.weights(x_BND)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded, y_BND = layer.weights(x_BND), layer(x_BND)
    assert rounded.dtype == torch.float32 and y_BND.isfinite().all()
    scores = exact.logit()
    assert (rounded.logit() - scores).abs().max() <= 2**-7 * (scores + math.log(4096)).abs().max()


def test_begins_local_under_rotation_only():
    for rope, expected in ((Rope(), 2.0), (None, 0.0)):
        layer = SigmoidAttention.build(validate_settings("mechanisms", "sigmoid", {}), MixerShape(16, 2, rope=rope))
        torch.nn.init.zeros_(layer.qkv.bias)
        layer.start_local(2.0)
        assert (layer.qkv.bias[:32] == expected).all() and not layer.qkv.bias[32:].any()
