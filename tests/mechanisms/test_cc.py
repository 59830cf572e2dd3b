"""Cross-consensus against a literal loop over Algorithm 6, and what its masks, blocks and graphs promise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stability.config.parts import validate_settings
from stability.mechanisms import build, cc
from stability.mechanisms._base import MixerShape
from tests.mechanisms.checks import HEADS, WIDTH, build_seeded, inputs, padding
from tests.mechanisms.oracles import consensus_edge_weight, cross_consensus, rotated
from tests.mechanisms.variants import CROSS, context, name_of
from tests.within import assert_within


def module(**settings) -> torch.nn.Module:
    return build_seeded(lambda: build("cc", width=WIDTH, heads=HEADS, **settings)).double()


def edges_of(layer: torch.nn.Module, num_positions: int, num_context: int) -> set[tuple[int, int]]:
    windowed = layer.config.graph == "window" or (layer.config.graph == "auto" and num_positions == num_context)
    pairs = {(i, j) for i in range(num_positions) for j in range(num_context)}
    return {(i, j) for i, j in pairs if abs(i - j) <= layer.config.window} if windowed else pairs


def context_padding(num_context: int) -> Tensor:
    """One sequence padded on the right, one padded inside, one without any valid context."""
    mask_BJ = torch.ones(3, num_context, dtype=torch.bool)
    mask_BJ[0, num_context // 2 :] = mask_BJ[1, 1] = mask_BJ[2] = False
    return mask_BJ


@pytest.mark.parametrize("settings", [*CROSS, {}, {"window": 5}, {"window": 20}], ids=name_of)
@pytest.mark.parametrize("num_context", [5, 9])
def test_equals_the_literal_loop_of_algorithm_6(settings, num_context):
    layer = module(**settings)
    if layer.config.graph == "window":
        num_context = 9
    if layer.config.step == "learned":
        with torch.no_grad():
            layer.step_before_softplus.copy_(torch.linspace(-3, -1, layer.config.iterations))
    x_BND, context_BJD = inputs(), context(num_context)
    edges = edges_of(layer, 9, num_context)
    torch.testing.assert_close(
        layer(x_BND, context_BJD), cross_consensus(layer, x_BND, context_BJD, [edges] * 3), rtol=0, atol=1e-10
    )
    mask_BN, mask_BJ = padding(), context_padding(num_context)
    of_rows = [{(i, j) for i, j in edges if mask_BN[b, i] and mask_BJ[b, j]} for b in range(3)]
    expected = cross_consensus(layer, x_BND * mask_BN[..., None], context_BJD, of_rows)
    found = layer(x_BND, context_BJD, mask_BN=mask_BN, context_mask_BJ=mask_BJ)
    torch.testing.assert_close(found[mask_BN], expected[mask_BN], rtol=0, atol=1e-10)


@pytest.mark.parametrize("graph", ["window", "complete"])
def test_gradient_descends_the_energy_of_rotated_signals_with_its_derivative_by_u(graph):
    """By autograd of ½ Σ (ũ_i − ṽ_j)ᵀR_ij(ũ_i − ṽ_j), the edge weights and the context held fixed."""
    layer, x_BND, context_BJD = module(graph=graph, rope="gradient").requires_grad_(False), inputs()[:1], context()[:1]
    u_ND, v_JD = layer.source(x_BND)[0].requires_grad_(), layer.context(context_BJD)[0]
    energy = torch.zeros(())
    for head in range(HEADS):
        part = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
        u_NK, v_JK = rotated(u_ND[:, part]), rotated(v_JD[:, part])
        for i, j in edges_of(layer, 9, 9):
            r_KK = consensus_edge_weight(layer, head, x_BND[0, i, part], context_BJD[0, j, part])
            energy = energy + 0.5 * (u_NK[i] - v_JK[j]) @ r_KK @ (u_NK[i] - v_JK[j])
    (derivative_ND,) = torch.autograd.grad(energy, u_ND)
    expected = layer.out(u_ND.detach() - layer.config.step_size * derivative_ND)
    assert_within((layer(x_BND, context_BJD)[0] - expected).abs().max(), 1e-12 * expected.abs().max())


@pytest.mark.parametrize("settings", [{}, {"graph": "complete"}, {"rank": 0}], ids=name_of)
def test_edge_weights_equal_algorithm_3_on_exactly_its_edges(settings):
    layer, x_BND, context_BJD = module(**settings), inputs(), context()
    source_E, target_E, r_BHEKK = layer.edge_weights(x_BND, context_BJD)
    ends = list(zip(source_E.tolist(), target_E.tolist(), strict=True))
    assert sorted(ends) == sorted(edges_of(layer, 9, 9))
    for head in range(HEADS):
        part = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
        expected = torch.stack(
            [consensus_edge_weight(layer, head, x_BND[1, i, part], context_BJD[1, j, part]) for i, j in ends]
        )
        torch.testing.assert_close(r_BHEKK[1, head], expected, rtol=0, atol=1e-10)
    assert (torch.linalg.eigvalsh(r_BHEKK) > 0).all()


@pytest.mark.parametrize("settings", [{}, {"graph": "complete"}], ids=name_of)
def test_what_padded_context_holds_changes_nothing(settings):
    layer, mask_BJ = module(**settings), context_padding(9)
    context_BJD = context().requires_grad_()
    y_BND = layer(inputs(), context_BJD, context_mask_BJ=mask_BJ)
    (gradient_BJD,) = torch.autograd.grad(y_BND.square().sum(), context_BJD)
    assert not gradient_BJD[~mask_BJ].count_nonzero()
    for content in (0.0, -1e3, float("nan")):
        other_BJD = context().masked_fill(~mask_BJ[..., None], content)
        assert torch.equal(layer(inputs(), other_BJD, context_mask_BJ=mask_BJ), y_BND)


@pytest.mark.parametrize("settings", [{}, {"graph": "complete"}, {"iterations": 3}], ids=name_of)
def test_a_row_without_valid_context_passes_the_two_projections_only(settings):
    layer, mask_BJ = module(**settings), context_padding(9)
    torch.testing.assert_close(
        layer(inputs(), context(), context_mask_BJ=mask_BJ)[2], layer.out(layer.source(inputs()[2])), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("numbers", [1, 700, 2000])
@pytest.mark.parametrize("rope", ["absolute", "relative", "gradient"])
def test_blocks_of_source_rows_change_nothing(monkeypatch, numbers, rope):
    layer, masks = (
        module(graph="complete", iterations=2, rope=rope),
        {"mask_BN": padding(), "context_mask_BJ": context_padding(5)},
    )
    whole = layer(inputs(), context(5), **masks)
    monkeypatch.setattr(cc, "BLOCK_NUMBERS", numbers)
    assert len(layer._blocks(inputs(), context(5), 1)) > 1
    torch.testing.assert_close(layer(inputs(), context(5), **masks), whole, rtol=0, atol=1e-13)


def test_one_position_sees_one_context():
    layer = module()
    expected = cross_consensus(layer, inputs(num_positions=1), context(1), [{(0, 0)}] * 3)
    torch.testing.assert_close(layer(inputs(num_positions=1), context(1)), expected, rtol=0, atol=1e-10)


def test_many_iterations_without_rope_bring_every_source_to_its_weighted_context():
    """The bipartite energy (Eq. 37) is least at u_i = (Σ_j R_ij)⁻¹ Σ_j R_ij v_j."""
    layer, x_BND, context_BJD = (
        module(rope="none", graph="complete", step_size=0.02, iterations=400, edge_gain=1.0),
        inputs(),
        context(5),
    )
    *_, r_BHEKK = layer.edge_weights(x_BND, context_BJD)
    r_BHNJKK = r_BHEKK.unflatten(2, (9, 5))
    v_BHJK = layer.context(context_BJD).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    least_BHNK = torch.linalg.solve(r_BHNJKK.sum(3), torch.einsum("bhnjkl,bhjl->bhnk", r_BHNJKK, v_BHJK))
    torch.testing.assert_close(
        layer(x_BND, context_BJD), layer.out(least_BHNK.transpose(1, 2).flatten(2)), rtol=0, atol=1e-8
    )


def test_learned_steps_are_parameters_that_start_at_the_fixed_one():
    fixed, learned = (module(step=step, iterations=3) for step in ("fixed", "learned"))
    assert {name for name, _ in learned.named_parameters()} - {name for name, _ in fixed.named_parameters()} == {
        "step_before_softplus"
    }
    torch.testing.assert_close(learned(inputs(), context()), fixed(inputs(), context()), rtol=1e-6, atol=1e-6)


def test_wrong_inputs_are_refused_in_one_line():
    bool_mask = torch.ones(3, 8, dtype=torch.bool)
    for call, message in (
        (
            lambda: module(graph="window")(inputs(), context(5)),
            "cross.graph=window needs a context as long as the source (9), got 5; choose auto or complete",
        ),
        (
            lambda: module()(inputs(), context(9, 2)),
            "the context has shape (2, 9, 16); expected (3, J, 16), as the source is (3, 9, 16)",
        ),
        (
            lambda: module()(inputs(), context(), context_mask_BJ=bool_mask),
            "context_mask_BJ has shape (3, 8); expected (3, 9), True where a position is valid",
        ),
        (
            lambda: module()(inputs(), context(), mask_BN=bool_mask),
            "mask_BN has shape (3, 8); expected (3, 9), True where a position is valid",
        ),
        (lambda: build("cc", width=15, heads=2), "width 15 is not divisible by heads 2; choose a divisor of 15"),
        (lambda: build("cc", width=16, heads=2, rank=-1), "cc.rank=-1: input should be greater than or equal to 0"),
        (lambda: build("cc", width=16, heads=2, step_size=0.0), "cc.step_size=0.0: input should be greater than 0"),
        (
            lambda: build("cc", width=16, heads=2, graph="cycle"),
            "cc.graph='cycle': input should be 'auto', 'window' or 'complete'",
        ),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_window_as_long_as_a_run_is_refused_where_it_is_read():
    layer = module(window=64)
    layer.check_positions(layer.config, 65, 65)
    layer.check_positions(module(window=64, graph="complete").config, 64, 64)
    layer.check_positions(layer.config, 64, 16)
    with pytest.raises(ValueError, match=r"^cross\.window=64 must be below model\.positions=64$"):
        layer.check_positions(layer.config, 64, 64)


@pytest.mark.parametrize("settings", [{}, {"graph": "complete"}, {"iterations": 2, "rope": "none"}], ids=name_of)
def test_an_empty_context_leaves_the_two_projections(settings):
    layer, x_BND = module(**settings), inputs()
    torch.testing.assert_close(layer(x_BND, context(0)), layer.out(layer.source(x_BND)), rtol=0, atol=1e-12)


def test_cost_counts_the_edges_of_its_graph():
    shape, config = MixerShape(WIDTH, HEADS), validate_settings("mechanisms", "cc", {})
    complete = validate_settings("mechanisms", "cc", {"graph": "complete"})
    assert cc.EXPORT.cost(config, shape, 32, 32) < cc.EXPORT.cost(complete, shape, 32, 32)
    assert cc.EXPORT.cost(config, shape, 32, 31) == cc.EXPORT.cost(complete, shape, 32, 31)
    of_edges = [cc.EXPORT.cost(complete, shape, 32, count) for count in (8, 16, 24)]
    assert of_edges[2] - of_edges[1] == of_edges[1] - of_edges[0] > 32 * 8 * WIDTH
