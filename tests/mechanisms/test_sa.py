from __future__ import annotations

import pytest
import torch

from stability.mechanisms import build
from tests.mechanisms.checks import build_seeded, inputs, padding
from tests.mechanisms.oracles import softmax_attention

MASKED = [(direction, padded) for direction in ("bidirectional", "causal") for padded in (False, True)]


def module(direction: str, **settings) -> torch.nn.Module:
    return build_seeded(lambda: build("sa", width=16, heads=2, direction=direction, **settings)).double()


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
    torch.testing.assert_close(
        layer(x_BND, mask_BN=torch.ones(x_BND.shape[:2], dtype=torch.bool)), layer(x_BND), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
def test_no_query_is_left_without_a_key(direction):
    mask_BN = padding()
    mask_BN[2] = False
    assert module(direction)._visible(mask_BN).any(-1).all()


def dense(layer, x_BND: torch.Tensor, visible_BNN: torch.Tensor) -> torch.Tensor:
    """The oracle's softmax over the visible pairs; a row without any has the empty sum, so that b_o is left."""
    expected, seen_BN = softmax_attention(layer, x_BND, visible_BNN), visible_BNN.any(-1)
    assert expected[seen_BN].isfinite().all() and not expected[~seen_BN].isfinite().any(), (
        "the oracle divides by an empty sum"
    )
    return torch.where(seen_BN[..., None], expected, layer.out.bias)


@pytest.mark.parametrize(("direction", "padded"), MASKED)
def test_with_a_masked_diagonal_equals_explicit_softmax_over_the_others(direction, padded):
    x_BND, layer = inputs(), module(direction, mask_diagonal=True)
    mask_BN = padding() if padded else torch.ones(x_BND.shape[:2], dtype=torch.bool)
    expected = dense(layer, x_BND, visible(direction, mask_BN) & ~torch.eye(x_BND.shape[1], dtype=torch.bool))
    found = layer(x_BND, mask_BN=mask_BN if padded else None)
    torch.testing.assert_close(found[mask_BN], expected[mask_BN], rtol=0, atol=1e-10)
    single = layer.float()(x_BND.float(), mask_BN=mask_BN if padded else None)
    torch.testing.assert_close(single[mask_BN], expected[mask_BN].float(), rtol=0, atol=1e-5)


def test_the_first_causal_position_with_a_masked_diagonal_takes_nothing_but_the_bias():
    layer, x_BND = module("causal", mask_diagonal=True), inputs()
    torch.testing.assert_close(layer(x_BND)[:, 0], layer.out.bias.expand(len(x_BND), -1), rtol=0, atol=0)
    alone = module("bidirectional", mask_diagonal=True)(x_BND[:, :1])
    torch.testing.assert_close(alone, layer.out.bias.expand_as(alone), rtol=0, atol=0)


@pytest.mark.parametrize("mask_diagonal", [False, True])
@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
def test_attentionx_of_gamma_one_is_what_is_left_of_the_values(direction, mask_diagonal):
    """Both mechanisms with the same weights and mask: (V − AV) + AV = V, whose projection AttentionX of γ = 0 gives."""
    attention, x_BND = module(direction, mask_diagonal=mask_diagonal), inputs()
    found = []
    for gamma in (1.0, 0.0):
        other = build(
            "attentionx", width=16, heads=2, direction=direction, gamma=gamma, mask_diagonal=mask_diagonal
        ).double()
        other.load_state_dict(attention.state_dict())
        found.append(other(x_BND))
    torch.testing.assert_close(found[0] + attention(x_BND) - attention.out.bias, found[1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
def test_what_a_masked_diagonal_gives_does_not_depend_on_a_positions_own_value(direction):
    layer = module(direction, mask_diagonal=True)
    value = slice(32, 48)
    x_BND = inputs()[:1].requires_grad_()
    with torch.no_grad():
        layer.qkv.weight[:32] = 0  # equal logits: what is left of x is the values
    for i in range(x_BND.shape[1]):
        (gradient_BND,) = torch.autograd.grad(layer(x_BND)[0, i].sum(), x_BND)
        assert not gradient_BND[0, i].count_nonzero() and layer.qkv.weight[value].count_nonzero()
        assert gradient_BND[0, :i].count_nonzero() or i == 0


def test_stands_in_a_pattern_with_a_masked_diagonal():
    layers = [
        build("mix", width=16, heads=2, layer=layer, num_layers=2, sa={"mask_diagonal": True}) for layer in range(2)
    ]
    assert layers[0].mask_diagonal and not hasattr(layers[1], "mask_diagonal")


def test_has_four_projections_with_bias():
    assert sum(parameter.numel() for parameter in module("causal").parameters()) == 4 * (16 * 16 + 16)
