"""``step=bounded``: η·λ_max of the dense operator stays below η, the layer without RoPE is a low-pass filter, and the
bound is one of each sequence alone, through which gradients flow."""

from __future__ import annotations

import pytest
import torch

from stability.mechanisms import build
from stability.mechanisms._edge_weights import EdgeWeights
from stability.mechanisms._pairs import Pairs
from stability.mechanisms.sc import largest_eigenvalue
from stability.probes.layers.consensus import consensus_spectra
from tests.mechanisms.checks import HEADS, WIDTH, build_seeded, inputs, padding
from tests.mechanisms.oracles import block_operator, consensus_edge_weight, edge_norm_bound
from tests.mechanisms.test_sc_limits import consensus, energy, per_head, signal
from tests.mechanisms.variants import GRAPHS, WithEdges
from tests.within import assert_within

HEAD_WIDTH = WIDTH // HEADS
ROUNDING = 1e-12  # of eigenvalues of size 1 in float64, of matrices of some dozen rows


def module(name: str = "sc", **settings):
    return build_seeded(lambda: build(name, width=WIDTH, heads=HEADS, step="bounded", **settings)).double()


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("rope", ["none", "absolute", "relative", "gradient"])
@pytest.mark.parametrize("settings", [{}, {"edge_gain": 40.0}, {"rank": 0, "window": 1}])
def test_the_operator_has_norm_1_at_most_whatever_is_rotated(graph, rope, settings):
    layer = build_seeded(lambda: WithEdges(graph=graph, rope=rope, step="bounded", **settings)).double()
    x_BND = inputs(num_positions=7)
    given = layer.edges(7)
    for b in range(len(x_BND)):
        source_E, target_E, r_BHEKK = layer.layer.edge_weights(x_BND[b : b + 1], **given)
        ends = list(zip(source_E.tolist(), target_E.tolist(), strict=True))
        for r_EKK in r_BHEKK[0].detach():
            operator = block_operator(dict(zip(ends, r_EKK, strict=True)), 7, HEAD_WIDTH, rope)
            assert_within(max(0.0, float(torch.linalg.matrix_norm(operator, 2)) - 1), ROUNDING)


def test_alpha_and_beta_bound_the_norm_of_an_edges_weight():
    layer, x_BND = module(rank=3), inputs()
    for head in range(HEADS):
        y_NK = x_BND[0, :, head * HEAD_WIDTH : (head + 1) * HEAD_WIDTH]
        for i, j in ((0, 1), (3, 2), (5, 7)):
            norm = torch.linalg.matrix_norm(consensus_edge_weight(layer, head, y_NK[i], y_NK[j]).detach(), 2)
            assert_within(float(norm), (1 + ROUNDING) * edge_norm_bound(layer, head, y_NK[i], y_NK[j]))


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(("step_size", "smallest"), [(0.5, 0.5), (1.0, 0.0), (2.0, -1.0)])
@pytest.mark.parametrize("iterations", [1, 3])
def test_without_rope_every_direction_is_multiplied_by_a_factor_between_1_minus_eta_and_1(
    graph, step_size, smallest, iterations
):
    settings = {"graph": graph, "step": "bounded", "step_size": step_size, "iterations": iterations}
    updated_BND, operators = consensus(signal(), **settings)
    factors, vectors = torch.linalg.eigh(torch.eye(operators.shape[-1], dtype=torch.float64) - step_size * operators)
    assert_within(factors.max() - 1, ROUNDING)
    assert_within(smallest - factors.min(), ROUNDING)
    assert factors.min() < 1 - 0.1 * step_size, "the bound is no smaller than the operator by orders of magnitude"
    powered = vectors @ torch.diag_embed(factors**iterations) @ vectors.mT
    expected = torch.einsum("bhij,bhj->bhi", powered, per_head(signal()))
    torch.testing.assert_close(per_head(updated_BND), expected, rtol=0, atol=1e-11)
    assert energy(updated_BND, operators) < energy(signal(), operators)


def test_the_probe_of_spectra_sees_a_filter_that_does_not_oscillate():
    bounded, fixed = (
        build_seeded(lambda step=step: build("sc", width=WIDTH, heads=HEADS, step=step, step_size=1.0)).double()
        for step in ("bounded", "fixed")
    )
    shares = []
    for layer in (bounded, fixed):
        found = [each.numbers for each in consensus_spectra(layer, inputs()[:1], probes=2, products=4, seed=0)]
        shares.append([each["non_oscillating"] for each in found])
        assert all(each["step_size"] == 1.0 for each in found)
    assert shares[0] == [1.0] * HEADS and max(shares[1]) < 1


@pytest.mark.parametrize("num_positions", [2, 5])
def test_equal_edges_of_the_complete_graph_have_the_closed_form(num_positions):
    """α alone, the same everywhere: λ_max = 2Nα against the bound 4(N − 1)α, so that u′ = u − η·N/(2(N − 1))·(u − ū)."""
    layer = module(graph="complete", rank=0, rope="none", step_size=0.8)
    with torch.no_grad():
        layer.scalar_weight.zero_()
        for projection in (layer.source, layer.out):
            projection.weight.copy_(torch.eye(WIDTH))
            projection.bias.zero_()
    u_BND = inputs(num_positions=num_positions)
    share = 0.8 * num_positions / (2 * (num_positions - 1))
    torch.testing.assert_close(layer(u_BND), u_BND - share * (u_BND - u_BND.mean(1, keepdim=True)), rtol=0, atol=1e-13)


def test_without_rotation_and_rank_a_context_is_averaged():
    """R_ij = α_ij: with η = 1 a source takes the mean of the context, weighted by α."""
    layer = module("cc", graph="complete", rank=0, rope="none", step_size=1.0)
    x_BND, context_BJD = inputs(), inputs(num_positions=4)
    _, _, r_BHEKK = layer.edge_weights(x_BND, context_BJD)
    shares_BHNJ = r_BHEKK[..., 0, 0].unflatten(-1, (x_BND.shape[1], 4))
    torch.testing.assert_close(shares_BHNJ.sum(-1), torch.ones_like(shares_BHNJ[..., 0]), rtol=0, atol=1e-13)
    v_BHJK = layer.context(context_BJD).unflatten(-1, (HEADS, HEAD_WIDTH)).transpose(1, 2)
    expected_BND = layer.out((shares_BHNJ @ v_BHJK).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x_BND, context_BJD), expected_BND, rtol=0, atol=1e-13)


@pytest.mark.parametrize("graph", ["window", "cycle", "complete", "top_w"])
def test_a_sequences_bound_is_its_own_and_leaves_padding_out(graph):
    layer, x_BND, mask_BN = module(graph=graph, rope="none", step_size=1.0), inputs(), padding()
    together_BND = layer(100 * x_BND, mask_BN=mask_BN)
    for b in range(len(x_BND)):
        alone_BND = layer(100 * x_BND[b : b + 1], mask_BN=mask_BN[b : b + 1])
        torch.testing.assert_close(alone_BND, together_BND[b : b + 1], rtol=0, atol=1e-11)
    num = int(mask_BN[0].sum())
    if graph in ("window", "complete", "top_w") and mask_BN[0, :num].all():
        cut_BND = layer(100 * x_BND[:1, :num])
        torch.testing.assert_close(cut_BND, together_BND[:1, :num], rtol=0, atol=1e-11)


def test_a_sequence_of_which_nothing_is_left_has_finite_second_derivatives():
    layer, mask_BN = module(step_size=1.0), torch.zeros(3, 9, dtype=torch.bool)
    mask_BN[0, 0] = mask_BN[1, :4] = True
    parameters = list(layer.parameters())
    gradients = torch.autograd.grad(layer(inputs(), mask_BN=mask_BN).square().sum(), parameters, create_graph=True)
    second = torch.autograd.grad(sum(each.square().sum() for each in gradients), parameters)
    assert all(torch.isfinite(each).all() for each in (*gradients, *second))


def test_gradients_flow_through_the_bound():
    """R over its bound does not change with the scale of R: the derivative along it is 0, which it would not be with
    the bound held."""
    draws = torch.Generator().manual_seed(0)
    graph = Pairs(2, 1, 6, None, None)
    alpha_HTBP = torch.rand(1, 2, *graph.shape, dtype=torch.float64, generator=draws)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    weights = EdgeWeights(scale * alpha_HTBP, None, None, scale * alpha_HTBP.sum(1))
    bound_HB1 = largest_eigenvalue(graph, weights.norm_HBP)
    for held, is_zero in ((bound_HB1, True), (bound_HB1.detach(), False)):
        total = weights.divide(held).alpha_HTBP.square().sum()
        (slope,) = torch.autograd.grad(total, scale, retain_graph=True)
        assert (abs(slope) <= 1e-13 * total) == is_zero


def test_the_bound_is_the_largest_degree_twice():
    """A path of three nodes: degrees 1, 1 + 5, 5."""
    graph = Pairs(1, 1, 3, None, None)
    norm_HBP = torch.tensor([[[1.0, 5.0]]], requires_grad=True)
    bound_HB1 = largest_eigenvalue(graph, norm_HBP)
    assert bound_HB1.tolist() == [[[12.0]]]
    assert torch.autograd.grad(bound_HB1.sum(), norm_HBP)[0].tolist() == [[[2.0, 2.0]]]
    masked = Pairs(1, 1, 3, torch.tensor([[True, True, False]]), None)
    assert largest_eigenvalue(masked, norm_HBP).tolist() == [[[2.0]]]
