"""AttentionX against a loop over positions, its paper's own equations, and what its rows without a key give."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms.attentionx import AttentionX
from tests.mechanisms.checks import build_seeded, inputs, padding
from tests.mechanisms.oracles import rotated

CASES = [(direction, masked) for direction in ("bidirectional", "causal") for masked in (False, True)]


def module(direction: str = "bidirectional", **settings) -> torch.nn.Module:
    return build_seeded(lambda: build("attentionx", width=16, heads=2, direction=direction, **settings)).double()


def heads_of(layer, x_ND):
    """q̃, k̃ and v of each head, (N, K) each, from slices of the projection's rows."""
    width, head_width = x_ND.shape[1], x_ND.shape[1] // layer.heads
    q, k, v = (
        x_ND @ layer.qkv.weight[row : row + width].T + layer.qkv.bias[row : row + width]
        for row in (0, width, 2 * width)
    )
    for start in range(0, width, head_width):
        part = slice(start, start + head_width)
        yield rotated(q[:, part]), rotated(k[:, part]), v[:, part]


def discrepancies(layer, x_ND, valid_N, direction, masked, gamma):
    """Φ of each head by loops: weights e^{logit} over the keys that a query sees, normalised by their own sum; nothing
    subtracted where there are none."""
    outputs = []
    for q, k, v in heads_of(layer, x_ND):
        phi = v.clone()
        for i in range(len(x_ND)):
            keys = [
                j
                for j in range(len(x_ND))
                if valid_N[j] and (j <= i or direction == "bidirectional") and not (masked and j == i)
            ]
            weights = [math.exp(float(q[i] @ k[j]) / math.sqrt(len(q[i]))) for j in keys]
            for j, weight in zip(keys, weights, strict=True):
                phi[i] = phi[i] - gamma * weight / sum(weights) * v[j]
        outputs.append(phi)
    return torch.cat(outputs, 1)


def by_loops(layer, x_BND, mask_BN, direction, masked, gamma):
    with torch.no_grad():
        phi = [
            discrepancies(layer, x_ND, valid_N, direction, masked, gamma)
            for x_ND, valid_N in zip(x_BND, mask_BN, strict=True)
        ]
        return torch.stack(phi) @ layer.out.weight.T + layer.out.bias


@pytest.mark.parametrize(("direction", "masked"), CASES)
@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_loop_over_queries_and_keys(direction, masked, padded):
    layer, x_BND = module(direction, gamma=1.7, mask_diagonal=masked), inputs()
    mask_BN = padding() if padded else torch.ones(x_BND.shape[:2], dtype=torch.bool)
    expected = by_loops(layer, x_BND, mask_BN, direction, masked, 1.7)
    found = layer(x_BND, mask_BN=mask_BN if padded else None)
    torch.testing.assert_close(found[mask_BN], expected[mask_BN], rtol=0, atol=1e-10)
    single = layer.float()(x_BND.float(), mask_BN=mask_BN if padded else None)
    torch.testing.assert_close(single[mask_BN], expected[mask_BN].float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("direction", "gamma", "masked"), [("bidirectional", 1.0, True), ("causal", 3.0, False)])
def test_without_settings_it_is_the_papers_recipe_for_the_direction(direction, gamma, masked):
    default, written = module(direction), module(direction, gamma=gamma, mask_diagonal=masked)
    assert torch.equal(default(inputs()), written(inputs()))
    assert (default.gamma, default.mask_diagonal) == (gamma, masked)


@pytest.mark.parametrize(("masked", "gamma"), [(True, 1.0), (False, 3.0)])
def test_gamma_follows_the_diagonal_where_only_that_is_chosen(masked, gamma):
    assert all(module(direction, mask_diagonal=masked).gamma == gamma for direction in ("bidirectional", "causal"))


@pytest.mark.parametrize(("direction", "masked"), CASES)
def test_gamma_zero_gives_the_projected_values(direction, masked):
    layer, x_BND = module(direction, gamma=0, mask_diagonal=masked), inputs()
    expected = (x_BND @ layer.qkv.weight[32:].T + layer.qkv.bias[32:]) @ layer.out.weight.T + layer.out.bias
    torch.testing.assert_close(layer(x_BND), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
def test_attention_is_the_values_less_the_discrepancy_of_gamma_one(direction):
    """sa with the same weights gives W_o(softmax·V): Φ of γ and sa of the same weights add up to the values."""
    layer, attention = (
        module(direction, gamma=2.5, mask_diagonal=False),
        build("sa", width=16, heads=2, direction=direction).double(),
    )
    attention.load_state_dict(layer.state_dict())
    values = module(direction, gamma=0)(inputs())
    bias = layer.out.bias
    torch.testing.assert_close(
        layer(inputs()) - bias + 2.5 * (attention(inputs()) - bias), values - bias, rtol=0, atol=1e-11
    )


def attention_rows(q, k, masked):
    logits = q @ k.T / math.sqrt(q.shape[1])
    if masked:
        logits = logits.masked_fill(torch.eye(len(q), dtype=torch.bool), -math.inf)
    return logits.softmax(-1)


@pytest.mark.parametrize("gamma", [1.0, 3.0])
def test_the_discrepancy_is_the_papers_two_terms(gamma):
    """Eq. 12: Φ_k = α_kk(1 − γ)v_k + Σ_{j≠k} α_kj(v_k − γv_j), the first term gone where γ = 1."""
    layer, x_ND = module(gamma=gamma, mask_diagonal=False), inputs()[0]
    two_terms = []
    for q, k, v in heads_of(layer, x_ND):
        alpha = attention_rows(q, k, masked=False)
        first = alpha.diagonal()[:, None] * (1 - gamma) * v
        second = torch.stack(
            [sum(alpha[i, j] * (v[i] - gamma * v[j]) for j in range(len(v)) if j != i) for i in range(len(v))]
        )
        assert gamma != 1 or not first.count_nonzero()
        two_terms.append(first + second)
    expected = torch.cat(two_terms, 1) @ layer.out.weight.T + layer.out.bias
    torch.testing.assert_close(layer(x_ND[None])[0], expected, rtol=0, atol=1e-11)


def test_masking_the_diagonal_divides_the_discrepancy_of_gamma_one_by_what_is_left():
    """Eq. 13, and more: with γ = 1, Φ = Σ_{j≠k} α_kj(v_k − v_j), and the masked softmax is α_kj/(1 − α_kk). So Φ_masked
    = Φ/(1 − α_kk): the inequality always holds, strictly unless Φ = 0."""
    x_ND = inputs()[0]
    for q, k, v in heads_of(module(), x_ND):
        alpha = attention_rows(q, k, masked=False)
        seen, masked = v - alpha @ v, v - attention_rows(q, k, masked=True) @ v
        torch.testing.assert_close(masked, seen / (1 - alpha.diagonal())[:, None], rtol=1e-11, atol=1e-12)
        assert (masked.norm(dim=1) > seen.norm(dim=1)).all()


def test_equal_values_make_the_papers_strict_inequality_an_equality():
    """Consensus itself: where all values agree, Φ is 0 with and without the diagonal."""
    same = torch.ones(1, 5, 16, dtype=torch.float64)
    for masked in (False, True):
        layer = module(gamma=1, mask_diagonal=masked)
        torch.testing.assert_close(layer(same)[0], layer.out.bias.expand(5, -1), rtol=0, atol=1e-12)


def test_the_papers_inequality_fails_where_zeroed_weights_are_not_renormalised():
    """Zeroing α_kk after the softmax (rows then sum to 1 − α_kk) gives Φ + α_kk v_k, which may be shorter: so it is the
    masked softmax that (13) means."""
    alpha, v = torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([[1.0], [4.0]])
    zeroed = v - (alpha - torch.diag(alpha.diagonal())) @ v
    assert zeroed[0].abs() < (v - alpha @ v)[0].abs()


def test_the_first_causal_position_with_a_masked_diagonal_keeps_its_value():
    layer, x_BND = module("causal", gamma=3, mask_diagonal=True), inputs()
    value = x_BND[:, 0] @ layer.qkv.weight[32:].T + layer.qkv.bias[32:]
    torch.testing.assert_close(layer(x_BND)[:, 0], value @ layer.out.weight.T + layer.out.bias, rtol=0, atol=1e-12)


def test_a_position_whose_other_keys_are_all_padding_keeps_its_value():
    layer, x_BND, mask_BN = module(gamma=1, mask_diagonal=True), inputs(), padding()
    mask_BN[0] = False
    mask_BN[0, 3] = True
    value = x_BND[0, 3] @ layer.qkv.weight[32:].T + layer.qkv.bias[32:]
    torch.testing.assert_close(
        layer(x_BND, mask_BN=mask_BN)[0, 3], value @ layer.out.weight.T + layer.out.bias, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(("direction", "masked"), CASES)
def test_first_and_second_derivatives_are_those_of_finite_differences(direction, masked):
    layer = build_seeded(
        lambda: build("attentionx", width=4, heads=1, direction=direction, mask_diagonal=masked)
    ).double()
    x_BND = inputs()[:1, :3, :4].clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradcheck(layer, (x_BND,))
        assert torch.autograd.gradgradcheck(layer, (x_BND,))


def test_has_as_many_parameters_as_self_attention():
    attention = build("sa", width=16, heads=2)
    assert {name: p.shape for name, p in module().named_parameters()} == {
        name: p.shape for name, p in attention.named_parameters()
    }


def test_costs_what_self_attention_costs():
    from stability.mechanisms.sa import SoftmaxAttention

    for direction in ("bidirectional", "causal"):
        shape = MixerShape(16, 2, direction)
        costs = [
            mechanism.cost(validate_settings("mechanisms", name, {}), shape, 32)
            for name, mechanism in (("attentionx", AttentionX), ("sa", SoftmaxAttention))
        ]
        assert costs[0] == costs[1]


def test_stands_in_a_pattern_with_its_own_settings():
    layers = [
        build(
            "mix", width=16, heads=2, layer=layer, num_layers=4, pattern=["attentionx", "sa"], attentionx={"gamma": 2}
        )
        for layer in range(4)
    ]
    assert [type(layer).__name__ for layer in layers] == [
        "AttentionX",
        "AttentionX",
        "SoftmaxAttention",
        "SoftmaxAttention",
    ]
    assert layers[0].gamma == 2 and layers[0].mask_diagonal
