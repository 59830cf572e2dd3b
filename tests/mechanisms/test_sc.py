from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stability.mechanisms import build
from tests.mechanisms.checks import HEADS, WIDTH, build_seeded, inputs
from tests.mechanisms.oracles import consensus_edge_weight
from tests.within import assert_within

FORMS = [{"rope": rope, "edge_mlp": mlp} for rope in ("absolute", "gradient", "none") for mlp in ("shared", "separate")]


def module(**settings) -> torch.nn.Module:
    return build_seeded(lambda: build("sc", width=WIDTH, heads=HEADS, **settings)).double()


def consensus(layer: torch.nn.Module, u_BND: Tensor, edges_of_BND: Tensor) -> Tensor:
    """u′ of a signal u on the edge weights that another signal makes: source and output projections are taken out."""
    with torch.no_grad():
        hidden_edges = layer._hidden(edges_of_BND, layer._graph(edges_of_BND, None, None))
        layer._hidden = lambda x_BND, graph: hidden_edges
        for projection in (layer.source, layer.out):
            projection.weight.copy_(torch.eye(WIDTH))
            projection.bias.zero_()
        return layer(u_BND)


@pytest.mark.parametrize("settings", FORMS)
def test_edge_weights_equal_algorithm_2_line_by_line(settings):
    layer, x_BND = module(rank=3, edge_hidden=5, **settings), inputs(num_positions=6)
    source_E, target_E, r_BHEKK = layer.edge_weights(x_BND)
    head_width = WIDTH // HEADS
    for b in range(len(x_BND)):
        for head in range(HEADS):
            y_NK = x_BND[b, :, head * head_width : (head + 1) * head_width]
            expected = torch.stack(
                [consensus_edge_weight(layer, head, y_NK[i], y_NK[j]) for i, j in zip(source_E, target_E, strict=True)]
            )
            torch.testing.assert_close(r_BHEKK[b, head], expected, rtol=0, atol=1e-10)


def test_heads_in_turn_and_heads_at_once_give_the_same_flows():
    layer, x_BND = module(), inputs()
    graph = layer._graph(x_BND, None, None)
    u_HKBN, hidden_HTXM = layer.project_heads(layer.source, x_BND), layer._hidden(x_BND, graph)
    in_turn = layer._update(u_HKBN, hidden_HTXM, graph)
    layer.heads_in_turn = lambda device: [slice(0, HEADS)]
    torch.testing.assert_close(in_turn, layer._update(u_HKBN, hidden_HTXM, graph), rtol=0, atol=1e-14)


def test_edge_weights_are_symmetric_positive_definite_and_directed():
    source_E, target_E, r_BHEKK = module().edge_weights(inputs())
    torch.testing.assert_close(r_BHEKK, r_BHEKK.mT, rtol=0, atol=1e-14)
    assert (torch.linalg.eigvalsh(r_BHEKK) > 0).all()
    place = {edge: index for index, edge in enumerate(zip(source_E.tolist(), target_E.tolist(), strict=True))}
    assert not torch.allclose(r_BHEKK[:, :, place[0, 1]], r_BHEKK[:, :, place[1, 0]])


def test_padding_on_the_right_is_absence():
    layer, x_BND = module(), inputs()
    mask_BN = (torch.arange(9) < 6).expand(3, -1)
    torch.testing.assert_close(layer(x_BND, mask_BN=mask_BN)[:, :6], layer(x_BND[:, :6]), rtol=0, atol=1e-12)


def test_padding_inside_removes_exactly_its_edges():
    layer, x_BND = module(window=1), inputs(num_positions=7)
    mask_BN = (torch.arange(7) != 3).expand(3, -1)
    alone = torch.cat(
        [
            layer(x_BND[:, :3]),
            layer(torch.cat([x_BND[:, :1]] * 4 + [x_BND[:, 4:]], 1), mask_BN=(torch.arange(7) > 3).expand(3, -1))[
                :, 4:
            ],
        ],
        1,
    )
    torch.testing.assert_close(layer(x_BND, mask_BN=mask_BN)[:, mask_BN[0]], alone, rtol=0, atol=1e-12)


# Invariances of consensus without RoPE (facts 1)


def test_sum_over_the_sequence_is_conserved():
    u_BND = inputs()
    torch.testing.assert_close(consensus(module(rope="none"), u_BND, inputs()).sum(1), u_BND.sum(1), rtol=0, atol=1e-12)


def test_constant_signal_passes_consensus_unchanged():
    constant_BND = inputs()[:, :1].expand(-1, 9, -1)
    torch.testing.assert_close(consensus(module(rope="none"), constant_BND, inputs()), constant_BND, rtol=0, atol=1e-12)


def test_shifting_the_signal_shifts_the_result():
    shift = inputs()[:1, :1]
    shifted = consensus(module(rope="none"), inputs() + shift, inputs())
    torch.testing.assert_close(shifted, consensus(module(rope="none"), inputs(), inputs()) + shift, rtol=0, atol=1e-12)


def test_source_bias_cancels_in_the_update_without_rope_only():
    for rope, cancels in (("none", True), ("absolute", False)):
        layer, x_BND = module(rope=rope), inputs()
        with torch.no_grad():
            before = layer(x_BND)
            shift = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)
            layer.source.bias.add_(shift)
            moved = layer(x_BND) - before - shift @ layer.out.weight.T
        if cancels:
            assert_within(moved.abs().max(), 1e-12)
        else:
            assert moved.abs().max() > 1e-2


# The zero-row rule of Eq. 36, sizes, and the settings' reach


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.0, 1e-30])
def test_zero_row_stays_zero_and_keeps_every_second_derivative_finite(dtype, size):
    layer, x_BND = module().to(dtype), inputs(dtype).requires_grad_()
    with torch.no_grad():
        for parameter in (layer.lambda_weight, layer.lambda_bias):
            parameter[:, : WIDTH // HEADS] *= size  # the first row of Λ, on every edge
    source_E, target_E, r_BHEKK = layer.edge_weights(x_BND)
    if size == 0:
        expected = consensus_edge_weight(
            layer, 0, x_BND[0, source_E[0], : WIDTH // HEADS], x_BND[0, target_E[0], : WIDTH // HEADS]
        )
        torch.testing.assert_close(r_BHEKK[0, 0, 0], expected)
    leaves = (x_BND, *layer.parameters())
    gradients = torch.autograd.grad(layer(x_BND).square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum((gradient * torch.ones_like(gradient)).sum() for gradient in gradients), leaves)
    assert all(tensor.isfinite().all() for tensor in (*gradients, *second))


@pytest.mark.parametrize(("hidden", "rank"), [(16, 4), (256, 1)])
def test_parameter_count_is_that_of_the_papers_shared_edge_mlp(hidden, rank):
    heads, head_width = 3, 64
    layer = build("sc", width=heads * head_width, heads=heads, edge_hidden=hidden, rank=rank)
    biases = 2 + rank * head_width
    of_edges = heads * (131 * hidden + rank * head_width * hidden + biases)
    of_projections = 2 * (heads * head_width) * (heads * head_width + 1)
    assert sum(parameter.numel() for parameter in layer.parameters()) == of_edges + of_projections


def test_separate_edge_mlps_add_two_first_layers():
    count = {
        mlp: sum(parameter.numel() for parameter in module(edge_mlp=mlp).parameters()) for mlp in ("shared", "separate")
    }
    assert count["separate"] - count["shared"] == HEADS * 2 * (2 * (WIDTH // HEADS) * 16 + 16)


def test_wrong_settings_are_refused_in_one_line():
    for settings, message in (
        ({"windw": 3}, "mechanism.sc.windw: unknown key; did you mean 'window'"),
        ({"window": 0}, "mechanism.sc.window=0: input should be greater than or equal to 1"),
        (
            {"rope": "relativ"},
            "mechanism.sc.rope='relativ': input should be 'absolute', 'relative', 'gradient' or 'none'",
        ),
        (
            {"graph": "ring"},
            "mechanism.sc.graph='ring': input should be 'window', 'cycle', 'complete', 'given' or 'top_w'",
        ),
        ({"step_size": 0.0}, "mechanism.sc.step_size=0.0: input should be greater than 0"),
        ({"rank": -1}, "mechanism.sc.rank=-1: input should be greater than or equal to 0"),
        ({"iterations": 0}, "mechanism.sc.iterations=0: input should be greater than or equal to 1"),
    ):
        with pytest.raises(ValueError) as caught:
            build("sc", width=16, heads=2, **settings)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_default_form_holds_the_parameters_of_earlier_checkpoints_drawn_in_their_order():
    layer = build_seeded(lambda: build("sc", width=WIDTH, heads=HEADS))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        source, out = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        expected = {
            f"{name}.{kind}": value
            for name, linear in (("source", source), ("out", out))
            for kind, value in linear.named_parameters()
        }
        for name, bound, shape in (
            ("pair_weight", 4 / 16**0.5, (HEADS, 2, 16, 8)),
            ("pair_bias", 1 / 16**0.5, (HEADS, 16)),
            ("scalar_weight", 4 / 16**0.5, (HEADS, 2, 16)),
            ("scalar_bias", 1 / 16**0.5, (HEADS, 2)),
            ("lambda_weight", 1 / 16**0.5, (HEADS, 32, 16)),
            ("lambda_bias", 1 / 16**0.5, (HEADS, 32)),
        ):
            expected[name] = torch.empty(shape).uniform_(-bound, bound)
    found = layer.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
